"""From outcomes to one record: medians over rounds of each round's own p50 and p99, as JSON can hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from meshbench.catalogue import FIGURES
from meshbench.rounds import Outcome
from meshbench.timing import quantile

SCHEMA = 1


def summarise(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The `figures`, `errors` and `left_behind` parts of a results file.

    A figure's value is the median of its rounds, each round's the median of its samples; the same for p99.
    """
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    errors: list[dict[str, Any]] = []
    left: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        behind = left.setdefault(outcome.system, {"processes": 0, "files": 0})
        behind["processes"] += outcome.processes_left
        behind["files"] += outcome.files_left
        if outcome.samples is None:
            errors.append(
                {
                    "system": outcome.system,
                    "item": outcome.item,
                    "round": outcome.round,
                    "error": outcome.error,
                }
            )
            continue
        for figure, samples in outcome.samples.items():
            rounds.setdefault(figure, {}).setdefault(outcome.system, []).append(_one_round(figure, samples))
    figures = {
        figure: {system: _over_rounds(each) for system, each in rounds[figure].items()}
        for figure in FIGURES
        if figure in rounds
    }
    return {"figures": figures, "errors": errors, "left_behind": left}


def single(value: float) -> dict[str, Any]:
    """A figure that is known and not sampled, such as a file's size.

    Example:
        >>> single(2.0)["p50"]
        2.0
    """
    return _over_rounds([{"p50": value, "samples": 1}])


def _one_round(figure: str, samples: list[float]) -> dict[str, float]:
    result = {
        "p50": quantile(samples, 0.5),
        "min": min(samples),
        "max": max(samples),
        "samples": len(samples),
    }
    if FIGURES[figure].tail:
        result["p99"] = quantile(samples, 0.99)
    return result


def _over_rounds(rounds: list[dict[str, float]]) -> dict[str, Any]:
    result: dict[str, Any] = {"p50": median(each["p50"] for each in rounds), "rounds": rounds}
    if "p99" in rounds[0]:
        result["p99"] = median(each["p99"] for each in rounds)
    return result


def value(figures: Mapping[str, Any], figure: str, system: str, stat: str = "p50") -> float | None:
    """One number of a results file, or None where it was not measured.

    Example:
        >>> value({"tensor": {"mesh": {"p50": 4.0}}}, "tensor", "mesh")
        4.0
    """
    found = figures.get(figure, {}).get(system, {}).get(stat)
    return None if found is None else float(found)
