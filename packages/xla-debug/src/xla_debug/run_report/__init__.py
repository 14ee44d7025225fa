"""``xla-debug run``: a recorded run, advice, and its HTML page."""
