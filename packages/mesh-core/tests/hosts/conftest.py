"""Between hosts: each test starts agents, and many repeat what other rooms test on one. A quick run takes a fifth of each file."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.sampled(5, of="file", full=True))
