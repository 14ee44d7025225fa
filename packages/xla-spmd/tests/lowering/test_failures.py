"""Steps over a mesh that cannot be computed: the operation is found, and only what depends on it is lost."""

import jax
import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
from xla_core.testing.internals import replacing_rule


@pytest.fixture
def unheard_of_digamma():
    """An operator whose lowering is well-formed, and refused by XLA without its name."""

    def unheard_of(x):
        return jax.ffi.ffi_call("nobody_knows_this", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    with replacing_rule(torch.ops.aten.digamma.default, unheard_of):
        yield


def test_an_operation_that_xla_refuses_namelessly_is_found(unheard_of_digamma):
    mesh = xs.Mesh(range(8), (8,), ("x",))
    split = xs.mark_sharding(torch.arange(16.0, device="xla"), mesh, ("x",))
    torch_xla.sync()
    kept = split.exp() + 1
    gone = (split * 2 + 1).digamma()
    later = gone.sum()
    with pytest.raises(RuntimeError, match=r"aten\.digamma.*test_failures.py.*nobody_knows_this"):
        torch_xla.sync()
    torch.testing.assert_close(kept.cpu(), torch.arange(16.0).exp() + 1)
    for lost in (gone, later):
        with pytest.raises(RuntimeError, match="never computed"):
            lost.tolist()
    assert split.tolist() == list(range(16))
