"""The training step of 8 billion parameters (the shape of Llama 3), for slices of 8 chips and more.

    xla-plan run examples/pods/llama_8b.py:training_step --topology v6e:4x4 --mesh fsdp=16

Each part of the batch is a sequence of 2048 tokens. docs/plan.md has its plans.
"""

from functools import partial

import llama

training_step = partial(llama.training_step, size="8b", length=2048, loop=True)
"""``llama.step_of`` this shape; its options, given by ``--set``, replace those here."""
