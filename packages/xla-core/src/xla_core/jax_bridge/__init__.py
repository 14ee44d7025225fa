"""The one place that touches private parts of jax and jaxlib, with the versions they were seen in."""
