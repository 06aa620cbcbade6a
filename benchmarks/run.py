"""Measure mesh and its peers side by side, in one run: `python benchmarks/run.py [--quick] [--only ITEM,…]`."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
sys.path.insert(0, str(HOME))

from meshbench.catalogue import FIGURES, ITEMS  # noqa: E402
from meshbench.environments import SYSTEMS, SetupError, build_program, build_wheel, prepare, versions  # noqa: E402
from meshbench.machine import describe  # noqa: E402
from meshbench.report import number, render  # noqa: E402
from meshbench.rounds import Outcome, adopt_orphans, run_all  # noqa: E402
from meshbench.summary import SCHEMA, single, summarise  # noqa: E402
from meshbench.targets import read  # noqa: E402
from meshbench.timing import quantile  # noqa: E402


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    everything = [name for name in SYSTEMS if name != "mesh-before"]
    add("--systems", default=",".join(everything), help="which to measure, by commas")
    add("--only", default=",".join(ITEMS), help="which items, by commas; see --list")
    add("--rounds", type=int, help="how often each is measured (default: 5, with --quick 1)")
    add("--quick", action="store_true", help="few samples: shows that everything works, not how fast it is")
    add(
        "--torch",
        action="store_true",
        help="install torch for every system and echo its tensors; it is large",
    )
    add("--label", default="run", help="part of the results' file names")
    add(
        "--mesh",
        type=Path,
        default=HOME.parent / "packages" / "mesh-core",
        help="mesh-core's folder or wheel",
    )
    add(
        "--before",
        type=Path,
        metavar="WHEEL",
        help="an older wheel of mesh-core, measured beside this one as the system mesh-before",
    )
    add("--envs", type=Path, default=HOME.parent / ".nox", help="where the environments are made and kept")
    add("--out", type=Path, default=HOME / "results", help="where the results are written")
    add(
        "--python",
        action="append",
        default=[],
        metavar="SYSTEM=PATH",
        help="use this interpreter for a system and install nothing; may be given several times",
    )
    add("--list", action="store_true", help="show items and figures, and end")
    add("--render", type=Path, metavar="JSON", help="write the Markdown of a results file anew, and end")
    return parser.parse_args(argv)


def _names(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise SystemExit(
            f"no {what} is called {', '.join(unknown) or 'nothing'}; there are {', '.join(known)}"
        )
    return [name for name in known if name in names]


def _show_list() -> None:
    for name, item in ITEMS.items():
        print(f"{name}: {', '.join(item.systems)}")
        for figure in item.figures:
            print(f"    {figure}: {FIGURES[figure].title}, {FIGURES[figure].unit}")


def _progress(outcome: Outcome, done: int, total: int) -> None:
    if outcome.samples is None:
        result = f"FAILED: {(outcome.error or '').splitlines()[-1]}"
    else:
        result = ", ".join(
            f"{name} {number(quantile(samples, 0.5))} {FIGURES[name].unit}"
            for name, samples in outcome.samples.items()
        )
    if outcome.processes_left:
        result += f" ({outcome.processes_left} processes left behind, ended)"
    print(
        f"[{done}/{total}] {outcome.item}, {outcome.system}: {result} [{outcome.seconds:.1f} s]", flush=True
    )


def _free_stem(folder: Path, stem: str) -> Path:
    """A name that no earlier result has: results are kept."""
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        path = folder / f"{stem}{suffix}.json"
        if not path.exists():
            return path
    raise SystemExit(f"{folder} holds a thousand results called {stem}; give another --label")


def _prepare(systems: list[str], options: argparse.Namespace) -> tuple[dict[str, Path], Path | None]:
    """The interpreter of each system, and mesh's wheel where one was built."""
    given: dict[str, Path] = {}
    for text in options.python:
        name, _, path = text.partition("=")
        _names(name, list(SYSTEMS), "system")
        given[name] = Path(path)
    if "mesh" in given:
        given.setdefault("mesh-nospin", given["mesh"])
    wheel: Path | None = options.mesh if options.mesh.suffix == ".whl" else None
    if any(SYSTEMS[name].environment == "mesh" and name not in given for name in systems):
        print("building mesh-core's wheel", flush=True)
        wheel = build_wheel(options.mesh, options.envs / "bench-mesh-wheel")
    pythons: dict[str, Path] = {}
    made: dict[str | None, Path] = {}
    for name in systems:
        environment, program = SYSTEMS[name].environment, SYSTEMS[name].program
        if program is not None:
            print(f"building {program}", flush=True)
            build_program(HOME, program)
        if name in given:
            pythons[name] = given[name]
            continue
        if environment not in made:
            print(f"preparing the environment of {name}", flush=True)
            built = options.before if name == "mesh-before" else wheel
            made[environment] = prepare(name, options.envs, wheel=built, torch=options.torch)
        pythons[name] = made[environment]
    return pythons, wheel


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write JSON and Markdown, print the Markdown; the exit status is 1 if something could not be measured."""
    options = _parse(argv)
    if options.list:
        _show_list()
        return 0
    targets = read(HOME / "targets.toml")
    if options.render:
        old: dict[str, Any] = json.loads(options.render.read_text())
        options.render.with_suffix(".md").write_text(render(old, targets))
        return 0
    systems = _names(options.systems, list(SYSTEMS), "system")
    if options.before is not None and "mesh-before" not in systems:
        systems.insert(systems.index("mesh") + 1 if "mesh" in systems else 0, "mesh-before")
    if "mesh-before" in systems and options.before is None:
        raise SystemExit("mesh-before is measured with --before WHEEL")
    items = _names(options.only, list(ITEMS), "item")
    rounds = options.rounds or (1 if options.quick else 5)
    machine = describe()
    adopt_orphans()
    options.envs.mkdir(parents=True, exist_ok=True)
    try:
        pythons, wheel = _prepare(systems, options)
        found = {name: versions(pythons[name]) for name in systems}
    except SetupError as problem:
        print(problem, file=sys.stderr)
        return 1
    started = datetime.datetime.now(datetime.UTC)
    outcomes = run_all(
        systems,
        items,
        rounds=rounds,
        pythons=pythons,
        home=HOME,
        quick=options.quick,
        torch=options.torch,
        progress=_progress,
    )
    summary = summarise(outcomes)
    if wheel is not None and "mesh" in systems and "size" in items:
        summary["figures"]["wheel"] = {"mesh": single(wheel.stat().st_size / 1e6)}
    record = {
        "schema": SCHEMA,
        "date": started.date().isoformat(),
        "label": options.label,
        "machine": machine,
        "settings": {
            "rounds": rounds,
            "quick": options.quick,
            "tensor": "torch" if options.torch else "numpy",
        },
        "versions": found,
        **summary,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = _free_stem(options.out, f"{record['date']}-{options.label}")
    path.write_text(json.dumps(record, indent=1) + "\n")
    page = render(record, targets)
    path.with_suffix(".md").write_text(page)
    print(page)
    print(f"written: {path} and {path.with_suffix('.md').name}")
    return 1 if summary["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
