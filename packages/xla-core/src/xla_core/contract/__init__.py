"""What crosses the border to device plugins and sibling packages. Imports nothing of ours, no torch, no jax."""
