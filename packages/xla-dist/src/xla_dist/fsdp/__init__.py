"""``torch_xla.distributed.fsdp``: parameters, gradients and optimizer state split over the replicas.

Read in this order: ``layouts`` (how one parameter is cut), ``names`` (what state dicts call the parts),
``units`` (what a step records: gather, free, gather again, reduce), ``fully_sharded`` (the module).
"""
