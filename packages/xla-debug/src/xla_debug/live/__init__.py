"""Reports that are written while a script runs, if environment variables ask for them."""
