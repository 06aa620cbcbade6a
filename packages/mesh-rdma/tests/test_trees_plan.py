"""The tree of a broadcast, without processes: who reads from whom, before and after ranks have failed."""

import random

import pytest

from mesh_rdma._trees._plan import SOURCE, Tree, fan_out


def way(tree, rank):
    """The ranks by which the bytes come, up to the first that has them all; ends, whoever reads from whom (TRE-2)."""
    found = []
    while not tree.has_all(rank):
        assert rank not in found, f"{rank} reads from itself by way of {found}"
        found.append(rank)
        rank = tree.parent(rank)
    return found


@pytest.mark.parametrize("chunks", [1, 4, 64])
def test_each_host_reads_once_from_elsewhere(chunks):
    """TRE-1."""
    rng = random.Random(chunks)
    for _ in range(200):
        hosts = [rng.randrange(20) for _ in range(rng.randrange(1, 60))]
        tree = Tree(hosts, chunks=chunks)
        parents = [tree.parent(rank) for rank in range(len(hosts))]
        crossing = [
            (hosts[rank], parent)
            for rank, parent in enumerate(parents)
            if parent == SOURCE or hosts[parent] != hosts[rank]
        ]
        assert len(crossing) == len(set(hosts))
        assert parents.count(SOURCE) == 1
        for rank in range(len(hosts)):
            way(tree, rank)


def test_the_order_begins_with_parents():
    tree = Tree([n % 7 for n in range(40)], chunks=1)
    seen = {SOURCE}
    for rank in tree.order():
        assert tree.parent(rank) in seen
        seen.add(rank)
    assert len(seen) == 41


def test_the_sources_host_passes_the_bytes_on():
    tree = Tree(["a", "a", "b", "b"], chunks=9, first="b")
    assert [tree.parent(rank) for rank in range(4)] == [2, 0, SOURCE, 2]


def test_long_chains_are_for_long_memory():
    assert fan_out(16, 64) == 1
    assert fan_out(16, 1) == 2
    assert fan_out(200, 8) == 2
    assert fan_out(1, 1) == 1
    # Where both take equally long, a chain is used: 16 - 1 + 7 == 2 * 7 + 2 * 4.
    assert [fan_out(16, chunks) for chunks in (6, 7, 8)] == [2, 1, 1]


@pytest.mark.parametrize(("chunks", "parents"), [(1, [SOURCE, 0, 0, 1, 1, 2]), (64, [SOURCE, 0, 1, 2, 3, 4])])
def test_a_host_gives_to_as_many_as_the_fan_out_says(chunks, parents):
    tree = Tree(range(16), chunks=chunks)
    assert [tree.parent(rank) for rank in range(6)] == parents


def test_the_first_orphan_of_a_host_reads_for_the_others():
    """TRE-1, after a death."""
    tree = Tree(["a", "a", "b", "b", "b", "b"], chunks=9)
    tree.bar(2)
    assert [tree.adopt(rank) for rank in (3, 4, 5)] == [0, 3, 4]


def test_nobody_is_left_without_bytes_that_anybody_has():
    """TRE-2."""
    rng = random.Random(1)
    for _ in range(300):
        hosts = [rng.randrange(5) for _ in range(rng.randrange(2, 30))]
        tree = Tree(hosts, chunks=rng.choice([1, 9]))
        dead: set[int] = set()
        done: set[int] = set()
        for _ in range(rng.randrange(1, 12)):
            one = rng.randrange(len(hosts))
            if rng.random() < 0.3 and one not in dead and way_is_clear(tree, one, dead):
                tree.complete(one)
                done.add(one)
            elif rng.random() < 0.1:
                dead.add(SOURCE)
                tree.bar(SOURCE)
            else:
                dead.add(one)
                tree.bar(one)
            while orphans := [
                rank for rank in range(len(hosts)) if rank not in dead | done and tree.parent(rank) in dead
            ]:
                rank = rng.choice(orphans)
                found = tree.adopt(rank)
                assert found not in dead
                if found is None:
                    assert SOURCE in dead and not done - dead
                    dead.add(rank)
                    tree.bar(rank)
        for rank in set(range(len(hosts))) - dead - done:
            assert not set(way(tree, rank)) & dead


def way_is_clear(tree, rank, dead):
    return not set(way(tree, rank)) & dead and (SOURCE not in dead)


def test_an_owner_that_one_cannot_read_is_read_by_others():
    tree = Tree(["a", "a", "a"], chunks=9)
    # Rank 1 cannot reach rank 0; rank 2 still does.
    assert tree.adopt(1) == 2
    assert tree.parent(2) == 0
    assert tree.adopt(1) == SOURCE
    assert tree.adopt(1) is None
