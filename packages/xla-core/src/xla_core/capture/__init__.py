"""Captured steps, which are recorded once and replayed without running their Python code."""
