"""Finds and starts device plugins and extensions."""
