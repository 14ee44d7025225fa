"""Plans as tables and as a page."""
