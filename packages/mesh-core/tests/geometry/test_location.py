"""Which hosts a mesh is on, without a job."""

from __future__ import annotations

import copy

import pytest

from mesh_core import Extent
from mesh_core._geometry.location import ListedLocation, Location, evenly, is_guest_mesh, is_host_mesh
from mesh_core._native import GUEST_MESHES, HOST_MESHES, Region


@pytest.mark.parametrize(
    ("first", "includes"),
    [(HOST_MESHES, is_host_mesh), (GUEST_MESHES, is_guest_mesh)],
    ids=["hosts", "guests"],
)
def test_four_billion_meshes_are_of_hosts_and_as_many_of_guests(first: int, includes: object) -> None:
    assert callable(includes)
    numbers = (first - 1, first, first + (1 << 32) - 1, first + (1 << 32))
    assert [includes(number) for number in numbers] == [False, True, True, False]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], []),
        ([3], [[3]]),
        ([0, 1, 2], [[0, 1, 2]]),
        ([0, 2, 4, 5], [[0, 2, 4], [5]]),
        ([1, 0], [[1], [0]]),
        ([4, 4, 5], [[4], [4, 5]]),
    ],
)
def test_numbers_are_split_into_evenly_spaced_ones(numbers: list[int], expected: list[list[int]]) -> None:
    assert [list(region) for region in evenly(numbers)] == expected


def listed(count: int, each: int = 1) -> ListedLocation:
    return ListedLocation(range(count), {host: f"b{host}" for host in range(count)}, each)


def test_each_host_of_a_list_has_as_many_ranks() -> None:
    two = listed(2, each=3)
    assert [two.name_of(rank) for rank in range(6)] == ["b0"] * 3 + ["b1"] * 3
    assert (two.only, two.label, listed(1).only) == (None, "2 hosts", 0)


def test_a_reference_carries_the_names_of_64_hosts() -> None:
    assert len(copy.copy(listed(64)).names) == 64
    carried = copy.copy(listed(65))
    assert (len(carried.names), len(carried.hosts)) == (64, 65)
    assert carried.name_of(64) == "host 64"


def test_the_hosts_of_a_part_are_looked_up_for_a_thousand_ranks() -> None:
    where = listed(2, each=1001)
    for size, called in ((1000, "b0"), (1001, "2 hosts")):
        assert where.called(Region.whole(Extent.of(gpus=size))) == called
    assert Location.on(3, "b3").called(Region.whole(Extent.of(gpus=5000))) == "b3"
    assert Location.on(3, "").label == "host 3"
