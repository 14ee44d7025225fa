"""The one place that touches private parts of torch; dtypes, the device guard, the namespace ``xla::``."""

# first: what torch loads of installed packages while it is imported needs modules of this folder, whole ones
import torch
