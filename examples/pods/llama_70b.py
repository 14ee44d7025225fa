"""The training step of 70 billion parameters (the shape of Llama 3), for slices of 256 chips.

    xla-plan run examples/pods/llama_70b.py:training_step --topology v5p:4x8x8 --mesh fsdp=256

Each part of the batch is a sequence of 4096 tokens. docs/plan.md has its plans.
"""

from functools import partial

import llama

training_step = partial(llama.training_step, size="70b", length=4096, loop=True)
"""``llama.step_of`` this shape; its options, given by ``--set``, replace those here."""
