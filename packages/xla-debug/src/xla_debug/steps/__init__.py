"""Prints and compares recorded steps."""
