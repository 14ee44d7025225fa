"""Recorded steps looked at, printed and compared."""
