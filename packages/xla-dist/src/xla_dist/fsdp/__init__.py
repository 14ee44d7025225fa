"""``torch_xla.distributed.fsdp``: splits parameters, gradients and optimizer state over the replicas.

Read in this order: ``layouts`` (how one parameter is cut), ``names`` (the parts' names in state dicts),
``units`` (the operations of a step: gather, free, gather again, reduce), ``fully_sharded`` (the module).
"""
