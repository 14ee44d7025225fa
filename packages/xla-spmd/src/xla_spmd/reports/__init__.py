"""What a partitioned program costs, and pictures of shardings."""
