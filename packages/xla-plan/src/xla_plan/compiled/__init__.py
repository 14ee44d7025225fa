"""Compiled modules as text, and what is counted in them."""
