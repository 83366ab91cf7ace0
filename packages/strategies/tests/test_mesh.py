"""Degrees of parallelism and the mesh that they make."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from hocket_strategies.mesh import data_group, data_mesh, degrees, make_mesh
from hocket_testkit.ranks import run_ranks


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.sampled_from(["replicate", "shard", "tensor", ""]))
def test_what_is_left_is_worked_out(replicate, shard, tensor, left_out):
    sizes = {"replicate": replicate, "shard": shard, "tensor": tensor}
    asked = {axis: None if axis == left_out else size for axis, size in sizes.items()}
    assert degrees(replicate * shard * tensor, asked, "fsdp") == sizes


def test_an_axis_that_is_not_given_is_1():
    assert degrees(4, {"shard": 4}, "fsdp") == {"replicate": 1, "shard": 4, "tensor": 1}


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"replicate": 2, "shard": 3},
            r"replicate=2 × shard=3 × tensor=1 is 6, but 4 ranks were started. Start 6 \(torchrun --nproc-per-node …\), or "
            r"write strategy=\{'fsdp': \{'replicate': 2, 'shard': 2\}\}",
        ),
        (
            {"shard": None, "tensor": 3},
            r"shard=\? × tensor=3 is a multiple of 3, but 4 .* Start 6 .*\{'shard': 2, 'tensor': 2\}",
        ),
        ({"tensor": 1, "shard": 1}, r"is 1, but 4 .*\{'shard': 4, 'tensor': 1\}"),
        ({"shard": None, "tensor": None}, r"None for shard and tensor, .*\{'tensor': 2\}"),
        ({"shard": 0}, "shard=0: give a positive int"),
        ({"shard": 2.0}, "shard=2.0"),
        ({"tensor": True}, "tensor=True"),
    ],
)
def test_what_cannot_be_is_explained(given, message):
    with pytest.raises(ValueError, match=message):
        degrees(4, given, "fsdp")


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9))
def test_what_the_message_says_to_type_works(world_size, shard, tensor):
    try:
        degrees(world_size, {"shard": shard, "tensor": tensor}, "fsdp")
    except ValueError as error:
        typed = eval(str(error).rpartition("strategy=")[2].removesuffix("."))["fsdp"]
        found = degrees(world_size, typed, "fsdp")
        assert {axis: found[axis] for axis in typed} == typed


def test_axes_have_names_and_neighbours_divide_layers():
    def rank_main(rank):
        mesh = make_mesh("cpu", degrees(4, {"shard": 2, "tensor": 2}, "x"))
        return mesh.mesh_dim_names, mesh.mesh.tolist(), data_mesh(mesh).mesh.tolist(), data_group(mesh).size()

    by_rank = run_ranks(rank_main, 4)
    assert {names for names, *_ in by_rank} == {("shard", "tensor")}
    assert [mine for *_, mine, _ in by_rank] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(ranks == [[0, 1], [2, 3]] and size == 2 for _, ranks, _, size in by_rank)


def test_three_axes_and_axes_of_one():
    def rank_main(rank):
        three = make_mesh("cpu", degrees(8, {"replicate": 2, "shard": 2, "tensor": 2}, "x"))
        one = make_mesh("cpu", degrees(8, {"replicate": 1, "shard": 8}, "x"))
        none = make_mesh("cpu", degrees(8, {"shard": 1, "tensor": 8}, "x"))
        meshes = three, data_mesh(three), one, data_mesh(one), none, data_mesh(none)
        groups = [data_group(mesh).size() for mesh in (three, one, none)]
        return [dict(zip(m.mesh_dim_names, m.shape, strict=True)) for m in meshes], groups

    for sizes, groups in run_ranks(rank_main, 8):
        assert sizes == [
            {"replicate": 2, "shard": 2, "tensor": 2},
            {"replicate": 2, "shard": 2},
            {"shard": 8},
            {"shard": 8},
            {"shard": 1, "tensor": 8},
            {"shard": 1},
        ]
        assert groups == [4, 8, 1]
