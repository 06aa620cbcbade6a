"""Between hosts: each test starts agents, and many repeat what other rooms test on one. A quick run takes a fifth of each file.

A full run takes all but half of those that `over_hosts` has made of other rooms' tests.
"""

import pytest

from levels import by_level


def pytest_itemcollected(item: pytest.Item) -> None:
    repeats = "__" in getattr(item, "originalname", item.name)
    one_in = by_level(quick=5, full=2, everything=1)
    item.add_marker(pytest.mark.sampled(one_in, of="file", full=not repeats))
