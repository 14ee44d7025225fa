"""The interfaces to device plugins and sibling packages. Imports no other package of ours, no torch, no jax."""
