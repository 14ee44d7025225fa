"""torch_xla.distributed.fsdp.utils: helpers of wrapped models (packages xla-dist and xla-spmd)."""

from __future__ import annotations

from torch_xla._packages import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "checkpoint_module": "xla_dist.fsdp.checkpointed",
        "BucketizedReduceScatter": "xla_dist.fsdp.stand_ins",
        "DummyReduceScatter": "xla_dist.fsdp.stand_ins",
        "dummy_all_gather": "xla_dist.fsdp.stand_ins",
        "dummy_all_reduce": "xla_dist.fsdp.stand_ins",
        "XLAPatchedLinear": "xla_spmd.training.linear",
        "apply_xla_patch_to_nn_linear": "xla_spmd.training.linear",
        "checkpoint": "xla_core.torch_features.checkpointing",
    },
)
