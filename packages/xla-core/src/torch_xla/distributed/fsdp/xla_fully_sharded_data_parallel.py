"""torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel (package xla-dist)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "XlaFullyShardedDataParallel": "xla_dist.fsdp.fully_sharded",
        "BucketizedReduceScatter": "xla_dist.fsdp.stand_ins",
        "DummyReduceScatter": "xla_dist.fsdp.stand_ins",
        "FLOAT_DTYPES": "xla_dist.fsdp.stand_ins",
        "apply_to_tensors": "xla_dist.fsdp.stand_ins",
        "collect_tensors": "xla_dist.fsdp.stand_ins",
        "dummy_all_gather": "xla_dist.fsdp.stand_ins",
        "dummy_all_reduce": "xla_dist.fsdp.stand_ins",
        "apply_xla_patch_to_nn_linear": "xla_spmd.training.linear",
        "recursive_wrap": "xla_dist.fsdp.wrap",
        "inf": "math",
    },
)
