"""``xla-debug run``: records a run, finds what to change, and reports it on the terminal and as an HTML page."""
