"""The page tells what was reached, missed and not measured; nothing here measures time."""

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from meshbench.catalogue import FIGURES, ITEMS
from meshbench.environments import SYSTEMS
from meshbench.report import render
from meshbench.rounds import Outcome
from meshbench.summary import summarise
from meshbench.targets import BEST_PEER, Target, judge, read

HOME = Path(__file__).resolve().parent.parent


def outcome(system, item, samples, *, number=0, error=None, processes_left=0):
    return Outcome(system, item, number, samples, error, 0.1, processes_left, 0)


def record(outcomes, **settings):
    return {
        "date": "2026-01-02",
        "label": "sample",
        "machine": {"processor": "An abacus", "cores": 2},
        "settings": {"rounds": 2, "quick": False, "tensor": "numpy", **settings},
        "versions": {"mesh": {"mesh-core": "0.1.0", "pip": "1"}},
        **summarise(outcomes),
    }


def calls(mesh, monarch):
    return [
        outcome("mesh", "call_sync", {"call_sync": [mesh]}),
        outcome("monarch", "call_sync", {"call_sync": [monarch]}),
    ]


def test_a_value_is_the_median_over_rounds_of_their_medians():
    rounds = [[1.0, 1.0, 9.0], [2.0, 2.0, 8.0], [5.0, 5.0, 7.0]]
    outcomes = [
        outcome("mesh", "call_sync", {"call_sync": samples}, number=i) for i, samples in enumerate(rounds)
    ]
    mesh = summarise(outcomes)["figures"]["call_sync"]["mesh"]
    assert (mesh["p50"], mesh["p99"], len(mesh["rounds"])) == (2.0, 8.0, 3)


def test_page_shows_figures_ratio_and_verdict():
    page = render(
        record(calls(mesh=50.0, monarch=700.0)),
        [Target("call_sync", Fraction(1, 12), at_most=True, against="monarch")],
    )
    assert "1 reached, 0 missed, 0 not measured" in page
    assert "| ≤ 1/12 of monarch's | 50 µs; 1/14 | reached |" in page
    assert "| one call, round trip, plain endpoint from a script, µs | 50 (50) | 700 (700) |" in page
    assert "| one call, round trip, plain endpoint from a script | 14× |" in page
    assert "An abacus" in page
    assert "mesh-core 0.1.0" in page


def test_a_missed_target_says_by_how_much():
    verdict = judge(
        Target("call_sync", Fraction(1, 12), at_most=True, against="monarch"),
        record(calls(mesh=100.0, monarch=600.0))["figures"],
    )
    assert verdict.met is False
    assert verdict.wording == "**missed** by 2.00×"


def test_more_is_better_figures_are_held_against_the_best_peer():
    peers = {"mesh": 6.0, "monarch": 0.4, "ray": 1.2, "xoscar": 0.5}
    target = Target("tensor", Fraction(4), at_most=False, against=BEST_PEER)
    figures = summarise([outcome(s, "tensor", {"tensor": [v]}) for s, v in peers.items()])["figures"]
    assert judge(target, figures).reached == 5
    del figures["tensor"]["ray"]  # the best of those that happened to be measured would flatter
    assert judge(target, figures).met is None


def test_what_was_not_measured_is_neither_reached_nor_missed():
    page = render(record(calls(50.0, 700.0)), [Target("tensor", Fraction(1), at_most=False)])
    assert "0 reached, 0 missed, 1 not measured" in page
    assert "not measured: tensor of mesh" in page


def test_a_bound_may_be_a_multiple_of_another_figure():
    target = Target("hosts_call", Fraction(2), at_most=True, of="hosts_call_here")
    outcomes = [
        outcome("mesh", "hosts_call", {"hosts_call": [30.0]}),
        outcome("mesh", "hosts_call_here", {"hosts_call_here": [20.0]}),
    ]
    assert judge(target, summarise(outcomes)["figures"]).reached == Fraction(3, 2)
    page = render(record(outcomes), [target])
    assert "| ≤ 2× “the same to this host, the others connected” | 30 µs; 1.5× | reached |" in page
    verdict = judge(target, summarise(outcomes[:1])["figures"])
    assert verdict.wording == "not measured: hosts_call_here of mesh"


def test_failures_and_leftovers_are_on_the_page():
    bad = outcome("ray", "call_2", None, error="exit status 1\nBoom: it broke", processes_left=3)
    page = render(record([*calls(50.0, 700.0), bad]), [])
    assert "call_2 on ray, round 1" in page
    assert "    Boom: it broke" in page
    assert "| ray | 3 | 0 |" in page


def test_a_quick_look_is_marked():
    assert "not to be quoted" in render(record(calls(1.0, 2.0), quick=True), [])


def test_the_targets_file_reads():
    targets = read(HOME / "targets.toml")
    assert {t.figure for t in targets} <= set(FIGURES)
    assert {t.against for t in targets} - {None, BEST_PEER} <= set(SYSTEMS)
    assert {t.of for t in targets} - {None} <= set(FIGURES)
    measured_on = {figure: item.systems for item in ITEMS.values() for figure in item.figures}
    for target in targets:
        if target.against not in (None, BEST_PEER):
            assert target.against in measured_on[target.of or target.figure], target


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('figure = "speed"\nat_most = "1"', "no figure is called 'speed'"),
        ('figure = "tensor"\nof = "speed"\nat_most = "1"', "a multiple of 'speed', which is no figure"),
        ('figure = "tensor"', "needs one of at_most and at_least"),
        ('figure = "tensor"\nat_most = "1"\nat_least = "1"', "needs one of at_most and at_least"),
    ],
)
def test_a_wrong_target_is_refused(tmp_path, text, complaint):
    path = tmp_path / "targets.toml"
    path.write_text(f"[[target]]\n{text}\n")
    with pytest.raises(ValueError, match=complaint):
        read(path)


def test_a_program_that_is_built_is_there_with_its_lock_file():
    for system in SYSTEMS.values():
        if system.program is not None:
            assert (HOME / system.program / "Cargo.toml").exists()
            assert (HOME / system.program / "Cargo.lock").exists()


def test_every_figure_comes_from_one_item():
    given = [figure for item in ITEMS.values() for figure in item.figures]
    assert sorted([*given, "wheel"]) == sorted(FIGURES)
    assert all(set(item.systems) <= set(SYSTEMS) for item in ITEMS.values())


def test_a_measurement_prints_nothing_but_json():
    done = subprocess.run(
        [sys.executable, "-m", "meshbench.child", "rawsocket", "call_sync", "--quick"],
        env={**os.environ, "PYTHONPATH": str(HOME)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    assert list(json.loads(done.stdout)) == ["call_sync"]
