"""These tests need RDMA devices. `test_soft_roce.py` runs them in a virtual machine that has some; elsewhere they are not collected.

There most processes that tests transfer from and to are copies of the fork servers that `run.py` starts. Those tests that take
long, and whose subject others have too, are left to whole runs: with `./dev test --all`, or `MESH_SOFT_ROCE=1`.
"""

import os
from pathlib import Path

import pytest

from levels import level
from mesh_rdma.testing._ends import Ends, Process
from mesh_rdma.testing._memory import HOST
from soft_roce.fork_server import Copy

if "SOFT_ROCE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent
LONG = {
    "test_ibverbs.py": {
        "test_a_reader_without_descriptors",
        "test_another_program_of_the_same_number",
        "test_another_transport_takes_over_for_all_devices",
        "test_descriptors_do_not_pile_up",
        "test_many_threads",
        "test_memory_of_a_transfer_that_was_cancelled",
        "test_memory_that_cannot_be_locked_is_left_to_other_transports",
        "test_memory_that_is_freed_under_transfers",
        "test_short_and_long_ones_read_and_write_the_same[9437187]",
    },
    "test_pyverbs.py": {
        "test_a_reader_without_descriptors",
        "test_a_thousand_registrations",
        "test_another_program_of_the_same_number",
        "test_costs_a_new_process_little",
        "test_descriptors_do_not_pile_up",
        "test_many_threads",
        "test_memory_that_cannot_be_locked_goes_through_memory_that_is",
        "test_names_of_other_memory",
        "test_the_transports_own_part_of_a_handle",
    },
}
"""Left to whole runs."""
SHORT = {
    "test_dma_buf.py": {
        "test_a_reader_that_is_killed_under_transfers",
        "test_an_owner_that_has_ended",
        "test_dropped_memory_is_gone",
        "test_many_at_once",
        "test_memory_of_a_transfer_that_was_cancelled",
        "test_nothing_outside_of_the_memory_is_reached",
        "test_reads_what_is_there",
        "test_slices",
        "test_writes_what_it_is_given_and_nothing_else",
    },
    "test_each_other.py": {
        "test_an_owner_that_has_ended",
        "test_dropped_memory_is_gone",
        "test_many_at_once",
        "test_nothing_outside_of_the_memory_is_reached",
        "test_reads_what_is_there",
        "test_slices",
        "test_writes_what_it_is_given_and_nothing_else",
    },
}
"""All of the suite that is not left to them: the engines have passed the whole suite each by itself."""

SERVERS = os.environ.get("SOFT_ROCE_SERVERS")
ENGINE = os.environ.get("SOFT_ROCE_ENGINE") or "native"


def pytest_collection_modifyitems(config, items):
    if level() == "all" or os.environ.get("MESH_SOFT_ROCE"):
        return
    left = [item for item in items if item.path.parent == HERE and is_left(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def is_left(item):
    file, test = item.path.name, item.name
    return item.cls is not None and test not in SHORT[file] if file in SHORT else test in LONG.get(file, ())


@pytest.fixture(scope="session")
def kind_of_other(kind_of_other):
    class Copied(kind_of_other):
        def start(self, before):
            # A program that changes something for another one can start that only.
            return super().start(before) if before else Copy(Path(SERVERS, ENGINE), "peer")

    return kind_of_other if SERVERS is None else Copied


@pytest.fixture(scope="class", autouse=True)
def copied_owners(request):
    """For the conformance suite."""
    if SERVERS is None or request.cls is None or not issubclass(request.cls, Ends):
        return
    # A busy machine has little time for a virtual one.
    request.cls.patience = 240
    path = Path(SERVERS, getattr(request.cls, "owners", ENGINE))

    class Copied(Process):
        @staticmethod
        def _start():
            return Copy(path, "owner" if request.cls.memory_there == HOST else "gpu")

    request.cls._kind_of_process = Copied  # noqa: SLF001 - how they are started is nobody else's to choose
