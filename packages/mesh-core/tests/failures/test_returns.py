"""Whether a rank is respawned, as its owner reports it: every order of events, without processes."""

from __future__ import annotations

from mesh_core._failures.returns import Returns


class Asker:
    """Keeps the answers it is given."""

    def __init__(self) -> None:
        self.told: list[int | None] = []

    def __call__(self, life: int | None) -> None:
        self.told.append(life)


def asked(returns: Returns, place: int = 0, life: int = 0, *, in_order: bool = False) -> list[int | None]:
    asker = Asker()
    returns.ask(place, life, asker, in_order=in_order)
    return asker.told


def decide(
    returns: Returns,
    event: object = None,
    *,
    gone: set[int] = frozenset(),  # type: ignore[assignment]
    left: set[int] = frozenset(),  # type: ignore[assignment]
    timers: tuple[object, ...] = (),
    put_off: bool = False,
    repairs: bool = False,
) -> None:
    returns.decided(event, gone=gone, left=left, timers=timers, put_off=put_off, repairs=repairs)


def restart(returns: Returns, *places: int) -> None:
    returns.back(returns.begin(places))


def test_a_later_incarnation_is_the_answer_now_or_once_it_exists() -> None:
    """RTN-1: there is one answer, however many incarnations follow."""
    returns = Returns(1)
    first = asked(returns)
    returns.struck(0)
    second = asked(returns)
    assert first == second == []
    restart(returns, 0)
    assert first == second == [1]
    assert asked(returns) == [1]
    # The current incarnation may have ended already without that being known here.
    assert (third := asked(returns, life=1)) == []
    returns.struck(0)
    restart(returns, 0)
    assert third == [2]
    assert first == second == [1]


def test_a_death_during_the_restart_is_not_forgotten() -> None:
    returns = Returns(1)
    returns.struck(0)
    begun = returns.begin([0])
    returns.struck(0)
    returns.back(begun)
    assert (told := asked(returns)) == []
    restart(returns, 0)
    assert told == [2]


def test_a_rank_whose_failure_was_passed_on_is_gone_until_respawned() -> None:
    returns = Returns(1)
    returns.struck(0)
    returns.struck(1)
    told, other = asked(returns), asked(returns, 1)
    decide(returns, gone={0}, put_off=True)
    assert told == [None] and other == []
    assert asked(returns) == [None]
    restart(returns, 0)
    assert asked(returns) == [1]


def test_an_ignored_rank_is_gone_once_nothing_is_pending() -> None:
    """RTN-2: there is no verdict while something is put off, due, or being repaired."""
    for still in ({"put_off": True}, {"timers": ("later",)}, {"repairs": True}):
        returns = Returns(1)
        returns.struck(0)
        told = asked(returns)
        decide(returns, left={0}, **still)  # type: ignore[arg-type]
        assert told == [], still
        if "repairs" in still:
            returns.repaired({1: 0}, None, lost=False)
        else:
            decide(returns, "later")
        assert told == [None], still


def test_a_rank_restarted_with_others_comes_back_with_them() -> None:
    returns = Returns(1)
    returns.struck(0)
    returns.struck(1)
    told = asked(returns)
    decide(returns, left={0}, put_off=True)
    decide(returns, repairs=True)
    was = returns.before({1}, [])
    restart(returns, 0, 1)
    returns.repaired(was, None, lost=False)
    assert told == [1]


def test_a_failed_repair_is_a_verdict_unless_the_policy_is_notified() -> None:
    returns = Returns(1)
    returns.struck(0)
    told = asked(returns)
    decide(returns, repairs=True)
    returns.repaired(returns.before({0}, []), "failed", lost=False)
    assert told == []
    decide(returns, "failed", repairs=True)
    assert told == []
    returns.repaired(returns.before({0}, []), None, lost=True)
    assert told == [None]


def test_without_failures_and_actors_the_answer_is_no() -> None:
    returns = Returns(1)
    assert asked(returns, in_order=True) == [None]
    returns.struck(0)
    told = asked(returns, in_order=True)
    assert told == []
    restart(returns, 0)
    assert told == [1]
    returns.stopped([0])
    assert asked(returns, life=1) == [None]


def test_the_end_answers_all_questions() -> None:
    """RTN-3, RTN-1."""
    returns = Returns(1)
    returns.struck(0)
    told = [asked(returns), asked(returns, 1), asked(returns, 1, 5)]
    returns.close()
    returns.close()
    assert told == [[None]] * 3
    assert asked(returns) == [None]
