"""The state of an actor by itself: its phases, and who drains its inbox."""

from __future__ import annotations

import random

import pytest

from mesh_core._hosting.cell_state import (
    ENDING,
    LENT,
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


@pytest.mark.parametrize("seed", range(20))
def test_the_inbox_has_one_who_drains_it_and_stays_with_the_loop_once_the_thread_is_gone(seed: int) -> None:
    chance, state, gone = random.Random(seed), CellState(threaded=True), False
    for _ in range(50):
        before = state.drains
        step = chance.choice([state.lend, state.hand_back, state.leave_errands, None])
        if step is not None:
            step()
        elif chance.random() < 0.1:
            state.drains, gone = LOOP, True
        assert state.loop_takes == (state.drains in {LOOP, LENT})
        assert state.threadless == (state.drains in {LOOP, NOBODY})
        assert not gone or state.drains == LOOP
        if before == NOBODY and not gone:
            assert state.drains == NOBODY


def test_an_actor_without_a_thread_is_the_loops() -> None:
    state = CellState(threaded=False)
    for step in (state.lend, state.hand_back, state.leave_errands):
        step()
        assert state.drains == LOOP
    assert CellState(threaded=True).drains == THREAD
