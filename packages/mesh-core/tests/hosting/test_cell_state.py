"""The state of an actor by itself: its phases, and who handles its messages."""

from __future__ import annotations

import pytest

from mesh_core._hosting.cell_state import (
    ENDING,
    LOOP,
    MAKING,
    NOBODY,
    OVER,
    THREAD,
    WORKING,
    CellState,
)


def test_phases_only_follow_each_other() -> None:
    state = CellState(threaded=True)
    assert (state.made, state.ending, state.over) == (False, False, False)
    assert [state.advance(phase) for phase in (WORKING, WORKING, ENDING, WORKING, OVER, ENDING, OVER)] == [
        True,
        False,
        True,
        False,
        True,
        False,
        False,
    ]
    assert (state.made, state.ending, state.over) == (True, True, True)


@pytest.mark.parametrize(
    ("phase", "given_up"), [(MAKING, True), (WORKING, False), (ENDING, False), (OVER, False)]
)
def test_only_what_is_not_made_is_given_up(phase: int, given_up: bool) -> None:
    state = CellState(threaded=False)
    state.advance(phase)
    assert (state.give_up(), state.over) == (given_up, given_up or phase == OVER)


@pytest.mark.parametrize("step", ["leave errands", "lose the thread"])
def test_the_loop_keeps_what_it_has_taken_over(step: str) -> None:
    state = CellState(threaded=True)
    assert (state.drains, state.threadless) == (THREAD, False)
    if step == "leave errands":
        state.leave_errands()
        assert (state.drains, state.threadless) == (NOBODY, True)
    else:
        state.drains = LOOP
        state.leave_errands()
        assert (state.drains, state.threadless) == (LOOP, True)


def test_an_actor_without_a_thread_is_the_loops() -> None:
    state = CellState(threaded=False)
    state.leave_errands()
    assert (state.drains, state.threadless) == (LOOP, True)
