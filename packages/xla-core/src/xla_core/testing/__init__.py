"""Helpers that tests of this package and of third-party packages share."""
