"""What extensions may import of xla-core, by purpose: ``docs/architecture.md`` lists the modules."""

# first: extensions that torch loads while it is imported need modules of this folder, whole ones
import torch
