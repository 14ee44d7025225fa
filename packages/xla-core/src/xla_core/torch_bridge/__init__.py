"""The one place that touches private parts of torch; dtypes, the device guard, the namespace ``xla::``."""
