"""Tensors, storages, views, and the trace that records what happens to them."""
