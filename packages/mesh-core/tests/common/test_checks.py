"""Checks of options, at the edges of what they accept."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mesh_core._common.checks import check_positive, is_whole, one_of, seconds, whole

LEAST = math.nextafter(0.0, 1.0)
"""The least number above 0."""


@pytest.mark.parametrize("least", [0, 1, 301])
def test_a_whole_number_is_accepted_from_its_least(least: int) -> None:
    assert whole(least, "Pool(per_rank=)", least) == least
    with pytest.raises(ValueError, match=rf"^Pool\(per_rank=\) must be at least {least}, got {least - 1}$"):
        whole(least - 1, "Pool(per_rank=)", least)
    assert is_whole(least, least)
    assert not is_whole(least - 1, least)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    assert not is_whole(value)
    with pytest.raises(TypeError, match="must be a whole number"):
        whole(value, "n", 0)


def test_seconds_are_above_0() -> None:
    assert seconds(LEAST, "timeout") == LEAST
    assert seconds(None, "timeout") is None
    for wrong in (0, -LEAST, math.nan):
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
            seconds(wrong, "timeout")
    for none in (True, "1"):
        with pytest.raises(TypeError, match="timeout must be a number of seconds or None"):
            seconds(none, "timeout")


def test_positive_options_are_above_0() -> None:
    check_positive(memory=LEAST, pids=1, timeout=None)
    for wrong in (0, -LEAST, math.nan):
        with pytest.raises(ValueError, match="memory must be positive"):
            check_positive(pids=1, memory=wrong)


def test_a_word_is_one_of_those_known() -> None:
    one_of("fork", "start", ("fork", "exec"))
    with pytest.raises(ValueError, match="start must be one of 'fork', 'exec', got 'spawn'"):
        one_of("spawn", "start", ("fork", "exec"))
