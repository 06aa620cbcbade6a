"""The labels and resources of a host, at the edges of what is accepted."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mesh_core._meshes.host_traits import check_labels, check_resources

EACH = pytest.mark.parametrize(("check", "value"), [(check_labels, ""), (check_resources, 0.0)])


@EACH
def test_as_many_names_as_allowed_each_as_long_as_allowed(check: Callable[[object], Any], value: Any) -> None:
    most = {f"{n:02}" + "é" * 31: value for n in range(64)}
    assert check(most) == most
    with pytest.raises(ValueError, match="must be at most 64, got 65"):
        check({**most, "one more": value})


@EACH
@pytest.mark.parametrize("name", ["", "x" * 65, "é" * 32 + "x"])
def test_a_name_has_at_least_a_letter_and_at_most_64_bytes(
    check: Callable[[object], Any], value: Any, name: str
) -> None:
    with pytest.raises(ValueError, match="must be printable texts of at most 64 bytes"):
        check({name: value})


@pytest.mark.parametrize("longest", ["x" * 256, "é" * 128])
def test_a_label_has_at_most_256_bytes(longest: str) -> None:
    assert check_labels({"zone": longest}) == {"zone": longest}
    with pytest.raises(ValueError, match="must be a printable text of at most 256 bytes"):
        check_labels({"zone": longest + "x"})


def test_a_resource_is_a_finite_number_from_0() -> None:
    for amount in (0.0, sys.float_info.max):
        assert check_resources({"gpus": amount}) == {"gpus": amount}
    for wrong in (-math.nextafter(0.0, 1.0), math.inf):
        with pytest.raises(ValueError, match="must be a number of at least 0"):
            check_resources({"gpus": wrong})
