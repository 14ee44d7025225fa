"""The training step of 405 billion parameters (the shape of Llama 3.1), for slices of 512 chips.

    xla-plan run examples/pods/llama_405b.py:training_step --topology v5p:8x8x8 --mesh fsdp=512

Each part of the batch is a sequence of 4096 tokens, whose loss is computed a quarter at a time. docs/plan.md has
its plan.
"""

from functools import partial

import llama

training_step = partial(llama.training_step, size="405b", length=4096, loop=True, loss_chunks=4)
"""``llama.step_of`` this shape; its options, given by ``--set``, replace those here."""
