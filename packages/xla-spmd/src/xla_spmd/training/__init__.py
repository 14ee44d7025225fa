"""Modules and layers trained over a mesh."""
