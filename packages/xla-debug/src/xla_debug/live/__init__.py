"""Reports written while a script runs, switched on by environment variables."""
