"""Reports: the costs of partitioned programs, automatic choices of shardings, and pictures of shardings."""
