"""Reads the text of compiled modules, and counts work and collectives in them."""
