"""Sharding texts and Shardy's form of them, against XLA's own and jax's."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_core.testing.jax_state import hlo_sharding
from xla_spmd.sharding.hlo_sharding import REPLICATED, ShardingType, canonical, parse
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.shardy import common_mesh

MESHES = [(8,), (4, 2), (2, 4), (2, 2, 2), (1, 8)]


@st.composite
def specs(draw, meshes=MESHES):
    """A mesh shape, and a partition spec on it."""
    shape = draw(st.sampled_from(meshes))
    axes = draw(st.permutations(range(len(shape))))
    rank = draw(st.integers(1, 3))
    groups = [[] for _ in range(rank)]
    for axis in axes[: draw(st.integers(0, len(axes)))]:
        groups[draw(st.integers(0, rank - 1))].append(axis)
    return shape, tuple(tuple(g) if len(g) > 1 else g[0] if g else None for g in groups)


def abstract_mesh(sizes, names):
    # jax 0.12.0: axes are explicit unless one says otherwise
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.AbstractMesh(sizes, names, axis_types=kinds)


def jaxs_sharding(shape, spec):
    names = tuple("abc"[: len(shape)])
    entries = [
        None if e is None else tuple(names[i] for i in e) if isinstance(e, tuple) else names[e]
        for e in spec
    ]
    mesh = abstract_mesh(shape, names)
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))
    return named._to_xla_hlo_sharding(len(spec))


@settings(deadline=None)
@given(specs())
def test_a_spec_means_what_it_means_in_jax(drawn):
    shape, spec = drawn
    mine = Mesh(np.arange(8), shape).get_op_sharding(spec)
    assert hlo_sharding(mine.text) == jaxs_sharding(shape, spec)


@settings(deadline=None)
@given(specs())
def test_texts_are_read_back_in_both_forms(drawn):
    shape, spec = drawn
    sharding = Mesh(np.arange(8), shape).get_op_sharding(spec)
    assert parse(sharding.text) == sharding
    generated = repr(jaxs_sharding(shape, spec))  # with <=[8], as compilers write it
    assert parse(generated) == sharding
    assert canonical(generated) == canonical(sharding.text)


@settings(deadline=None)
@given(specs())
def test_indices_are_those_of_jax(drawn):
    shape, spec = drawn
    value = (8,) * len(spec)
    sharding = Mesh(np.arange(8), shape).get_op_sharding(spec)
    assert sharding.shard_shape(value) == tuple(
        8 // math.prod(shape[a] for a in (e if isinstance(e, tuple) else () if e is None else (e,)))
        for e in spec
    )
    found = sharding.indices(value)
    whole = np.arange(8 ** len(spec)).reshape(value)
    copies = 8 // math.prod(sharding.per_dimension or (1,))
    if found:
        seen = np.concatenate([whole[found[d]].ravel() for d in range(8)])
        assert sorted(seen) == sorted(whole.ravel().tolist() * copies)


@settings(deadline=None)
@given(st.lists(specs(((2, 2, 2),)), min_size=1, max_size=4))
def test_shardys_form_means_the_same(drawn):
    mesh = Mesh(np.arange(8), (2, 2, 2))
    shardings = [mesh.get_op_sharding(spec) for _, spec in drawn]
    common = common_mesh(shardings, 8)
    assert common is not None and math.prod(common.sizes) == 8
    for sharding, (_, spec) in zip(shardings, drawn, strict=True):
        text = common.annotation(sharding, len(spec))
        entries = [
            tuple(n for n in part.replace('"', "").split(", ") if n)
            for part in text.rpartition("[{")[2].removesuffix("}]>").split("}, {")
        ]
        named = jax.sharding.NamedSharding(
            abstract_mesh(common.sizes, common.names),
            jax.sharding.PartitionSpec(*entries),
        )
        assert named._to_xla_hlo_sharding(len(spec)) == hlo_sharding(sharding.text)


def test_a_permuted_mesh_gets_its_order_of_devices():
    mesh = Mesh([3, 1, 2, 0], (2, 2))
    split = [mesh.get_op_sharding((0, 1)), mesh.get_op_sharding((1, None))]
    common = common_mesh(split, 4)
    assert common is not None and common.order != (0, 1, 2, 3)
    assert f"device_ids={list(common.order)}" in common.annotation(split[0], 2)
    straight = Mesh(range(4), (2, 2)).get_op_sharding((0, 1))
    assert common_mesh([*split, straight], 4) is None  # one order does not step through the other


@pytest.mark.parametrize(
    "pair",
    [
        (((2, 3), (0, None)), ((3, 2), (0, None))),  # no mesh has both 2 x 3 and 3 x 2
        (((6,), (0, None)), ((6,), (0, None))),
    ],
)
def test_where_no_common_mesh_exists_there_is_none(pair):
    (first, spec), (second, other) = pair
    one = Mesh(np.arange(6), first).get_op_sharding(spec)
    two = Mesh(np.arange(6), second).get_op_sharding(other)
    assert (common_mesh([one, two], 6) is None) == (one != two)
    assert common_mesh([parse("{manual}")], 6) is None


def test_kinds():
    mesh = Mesh(np.arange(4), (2, 2), ("data", "model"))
    texts = {
        ("data", "model"): ("{devices=[2,2]0,1,2,3}", 3),
        ("data", None): ("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", 5),
        (None, "model"): ("{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}", 5),
        (None, None): ("{replicated}", 0),
        (("data", "model"), None): ("{devices=[4,1]0,1,2,3}", 3),
        ("model", "data"): ("{devices=[2,2]0,2,1,3}", 3),
    }
    for spec, (text, kind) in texts.items():
        sharding = mesh.get_op_sharding(spec)
        assert (sharding.text, int(sharding.type)) == (text, kind)
    assert parse(None) is REPLICATED
    assert parse("{maximal device=3}").type is ShardingType.MAXIMAL
    assert parse("{maximal device=3}").text == "{maximal device=3}"
    manual = "{devices=[2,1,2]0,1,2,3 last_tile_dims={manual}}"
    assert parse(manual).text == manual


@pytest.mark.parametrize("text", ["", "replicated", "{devices=[2,2]0,1}", "{devices=[2]<=[3]}"])
def test_what_is_no_sharding_is_refused(text):
    with pytest.raises(ValueError, match="is not an HLO sharding"):
        parse(text)
