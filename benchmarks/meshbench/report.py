"""A results file as Markdown: targets and verdicts, all figures side by side, the spread, the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshbench.catalogue import FIGURES
from meshbench.environments import SYSTEMS
from meshbench.summary import value
from meshbench.targets import Target, judge

_SHOWN_VERSIONS = ("mesh-core", "torchmonarch", "ray", "xoscar", "numpy", "torch", "python")


def render(record: Mapping[str, Any], targets: Sequence[Target]) -> str:
    """The whole page; it ends with a line feed."""
    parts = [_heading(record), _targets(record, targets), _figures(record), _ratios(record), _spread(record)]
    parts += [_left_behind(record), _errors(record), _versions(record)]
    return "\n".join(part for part in parts if part)


def number(x: float) -> str:
    """Three significant digits, thousands parted.

    Example:
        >>> number(12345.6), number(5.648), number(0.03412)
        ('12,300', '5.65', '0.0341')
    """
    if x == 0:
        return "0"
    rounded = float(f"{x:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers.

    Example:
        >>> print(table(["a", "b"], [["x", "1"]]), end="")
        | a | b |
        | --- | ---: |
        | x | 1 |
    """
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *map(list, rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _columns(record: Mapping[str, Any]) -> list[str]:
    return [s for s in SYSTEMS if any(s in each for each in record["figures"].values())]


def _heading(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    machine = ", ".join(f"{key}: {what}" for key, what in record["machine"].items())
    quick = " **A quick look: few samples, not to be quoted.**" if settings["quick"] else ""
    return (
        f"# Benchmarks {record['date']}, {record['label']}\n\n"
        f"{machine}.\n\n"
        f"Up to {settings['rounds']} rounds, systems in turn within each; every measurement in a fresh interpreter; tensors are "
        f"{settings['tensor']} arrays. A value is the median over rounds of each round's median (p99: of each round's "
        f"p99).{quick}\n"
    )


def _targets(record: Mapping[str, Any], targets: Sequence[Target]) -> str:
    verdicts = [judge(target, record["figures"]) for target in targets]
    rows = []
    for verdict in verdicts:
        target = verdict.target
        figure = FIGURES[target.figure]
        stat = f", {target.stat}" if figure.tail else ""
        mine = value(record["figures"], target.figure, "mesh", target.stat)
        measured = "—" if mine is None else f"{number(mine)} {figure.unit}"
        if target.relative and verdict.reached is not None:
            ratio = float(verdict.reached)
            measured += f"; {f'1/{number(1 / ratio)}' if 0 < ratio < 0.5 else f'{number(ratio)}×'}"
        note = f" ({target.note})" if target.note else ""
        rows.append([f"{figure.title}{stat}", target.wording + note, measured, verdict.wording])
    met = sum(verdict.met is True for verdict in verdicts)
    missed = sum(verdict.met is False for verdict in verdicts)
    tally = f"{met} reached, {missed} missed, {len(verdicts) - met - missed} not measured."
    return f"## Targets\n\n{tally}\n\n" + table(["figure", "target", "mesh", "verdict"], rows)


def _figures(record: Mapping[str, Any]) -> str:
    columns = _columns(record)
    rows = []
    for name, figure in FIGURES.items():
        if name not in record["figures"]:
            continue
        cells = []
        for system in columns:
            p50, p99 = (value(record["figures"], name, system, stat) for stat in ("p50", "p99"))
            cells.append(
                "—" if p50 is None else number(p50) + (f" ({number(p99)})" if p99 is not None else "")
            )
        rows.append([f"{figure.title}, {figure.unit}", *cells])
    return "## Figures\n\nMedian, and p99 in parentheses.\n\n" + table(["figure", *columns], rows)


def _ratios(record: Mapping[str, Any]) -> str:
    others = [system for system in _columns(record) if system != "mesh"]
    rows = []
    for name, figure in FIGURES.items():
        cells = []
        for system in others:
            mine, theirs = (value(record["figures"], name, s) for s in ("mesh", system))
            if not mine or not theirs:
                cells.append("—")
            else:
                cells.append(f"{number(mine / theirs if figure.more_is_better else theirs / mine)}×")
        if any(cell != "—" for cell in cells):
            rows.append([figure.title, *cells])
    if not rows:
        return ""
    explained = "How many times better mesh's median is; below 1× it is worse.\n\n"
    return f"## Mesh against each\n\n{explained}" + table(["figure", *(f"than {s}" for s in others)], rows)


def _spread(record: Mapping[str, Any]) -> str:
    if record["settings"]["rounds"] < 2:
        return ""
    columns = _columns(record)
    rows = []
    for name, figure in FIGURES.items():
        if name not in record["figures"]:
            continue
        cells = []
        for system in columns:
            medians = [each["p50"] for each in record["figures"][name].get(system, {}).get("rounds", [])]
            cells.append(f"{number(min(medians))} – {number(max(medians))}" if len(medians) > 1 else "—")
        rows.append([f"{figure.title}, {figure.unit}", *cells])
    return "## Spread\n\nThe lowest and the highest round's median.\n\n" + table(["figure", *columns], rows)


def _left_behind(record: Mapping[str, Any]) -> str:
    rows = [
        [system, str(left["processes"]), str(left["files"])]
        for system, left in record["left_behind"].items()
        if left["processes"] or left["files"]
    ]
    if not rows:
        return "## Left behind\n\nNo system left a process or a temporary file.\n"
    explained = "Over all runs: processes that had to be ended, and files in the temporary folder.\n\n"
    return f"## Left behind\n\n{explained}" + table(["system", "processes", "files"], rows)


def _errors(record: Mapping[str, Any]) -> str:
    if not record["errors"]:
        return ""
    parts = ["## What failed\n"]
    for each in record["errors"]:
        text = "\n".join(f"    {line}" for line in each["error"].splitlines())
        parts.append(f"{each['item']} on {each['system']}, round {each['round'] + 1}:\n\n{text}\n")
    return "\n".join(parts)


def _versions(record: Mapping[str, Any]) -> str:
    rows = [
        [system, ", ".join(f"{name} {found[name]}" for name in _SHOWN_VERSIONS if name in found)]
        for system, found in record["versions"].items()
    ]
    return "## Versions\n\n| system | versions |\n| --- | --- |\n" + "".join(
        f"| {a} | {b} |\n" for a, b in rows
    )
