"""The user's lines, found on Python's stack."""
