"""Reports of plans: tables, and an HTML page."""
