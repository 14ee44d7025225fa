"""docs/migration.md: what its tables name is there; its blocks are run by ``test_pages.py``."""

from __future__ import annotations


def test_the_names_in_its_tables_exist(run_program):
    script = """
    import torch, torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    import torch_xla.distributed.parallel_loader as pl
    from torch_xla.amp import GradScaler
    from torch_xla.core.xla_builder import jax_import_guard
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
    from torch_xla.experimental.custom_kernel import make_kernel_from_pallas
    import xla_debug.recompile
    named = (torch_xla.manual_seed, torch_xla.launch, torch_xla.experimental.eager_mode, xm.get_memory_info,
             xr.use_spmd, xs.mark_sharding, pl.MpDeviceLoader, xla_debug.recompile.report)
    assert all(map(callable, named))
    torch.manual_seed(3)
    first = torch.rand(3, device="xla").cpu()
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(3, device="xla").cpu())
    print(sorted(xm.get_memory_info("xla:0")))
    """
    run_program(script)
