import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.hardware import Mesh, MeshError, Span


def test_the_last_dimension_is_the_fastest():
    mesh = Mesh((("pp", 2), ("fsdp", 4)), gpus_per_node=8, gpus=8)
    assert mesh.coordinate(5) == {"pp": 1, "fsdp": 1}
    assert mesh.rank({"pp": 1, "fsdp": 1}) == 5
    assert mesh.group(5, "fsdp") == (4, 5, 6, 7)
    assert mesh.group(5, "pp") == (1, 5)
    assert mesh.group(5, "pp", "fsdp") == tuple(range(8))


def test_shards_inside_a_node_and_replicas_across_nodes():
    mesh = Mesh((("replicate", 4), ("fsdp", 8)), gpus_per_node=8, gpus=32)
    assert mesh.span("fsdp") == Span(size=8, nodes=1, ranks_per_node=8)
    assert mesh.span("replicate") == Span(size=4, nodes=4, ranks_per_node=1)
    assert mesh.span("replicate", "fsdp") == Span(size=32, nodes=4, ranks_per_node=8)


def test_a_shard_group_over_sixteen_nodes():
    mesh = Mesh((("fsdp", 128),), gpus_per_node=8, gpus=128)
    assert mesh.span("fsdp") == Span(size=128, nodes=16, ranks_per_node=8)


def test_a_group_that_straddles_two_nodes_is_not_even():
    mesh = Mesh((("replicate", 4), ("fsdp", 6)), gpus_per_node=8, gpus=24)
    assert mesh.span("fsdp", rank=6) == Span(size=6, nodes=2, ranks_per_node=4)


def test_an_absent_dimension_has_degree_one_and_groups_of_one():
    mesh = Mesh((("fsdp", 2),), gpus_per_node=8, gpus=2)
    assert mesh.degree("tp") == 1
    assert mesh.group(1, "tp") == (1,)
    assert mesh.span("tp") == Span(size=1, nodes=1, ranks_per_node=1)


def test_one_gpu_is_a_mesh_without_dimensions():
    assert Mesh((), gpus_per_node=1, gpus=1).size == 1


def test_degrees_must_multiply_to_the_gpus():
    with pytest.raises(MeshError, match="fsdp 8 x tp 2 = 16 ranks, but the cluster has 8 GPUs"):
        Mesh((("fsdp", 8), ("tp", 2)), gpus_per_node=8, gpus=8)
    with pytest.raises(MeshError, match="one rank, but the cluster has 8 GPUs"):
        Mesh((), gpus_per_node=8, gpus=8)


def test_degrees_are_counts_and_names_differ():
    with pytest.raises(MeshError):
        Mesh((("fsdp", 0),), gpus_per_node=8, gpus=8)
    with pytest.raises(MeshError):
        Mesh((("fsdp", 2), ("fsdp", 4)), gpus_per_node=8, gpus=8)


def test_a_rank_outside_the_mesh_is_an_error():
    with pytest.raises(IndexError):
        Mesh((("fsdp", 2),), gpus_per_node=8, gpus=2).coordinate(2)


@given(degrees=st.lists(st.integers(1, 4), min_size=1, max_size=4), gpus_per_node=st.integers(1, 8), data=st.data())
def test_groups_partition_the_ranks(degrees, gpus_per_node, data):
    names = ("pp", "replicate", "fsdp", "tp")[: len(degrees)]
    size = 1
    for degree in degrees:
        size *= degree
    mesh = Mesh(tuple(zip(names, degrees)), gpus_per_node, size)
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(size)] == list(range(size))
    name = data.draw(st.sampled_from(names))
    groups = {mesh.group(rank, name) for rank in range(size)}
    assert sorted(rank for group in groups for rank in group) == list(range(size))
    assert {len(group) for group in groups} == {mesh.degree(name)}
