"""Finds the user's lines on Python's stack, and the statements around them in the source."""
