"""Sandboxes one after another and many at once: how long until there is one, and until it has answered; and what is left.

    python benchmarks/sandboxes.py --json sandboxes.json

`take` is the time until a sandbox is there, `start` the time until its first call has answered. "In a row" is a loop that does
nothing else, so that each one is made while the one before is ended; "at once" is that many threads that begin together,
with as many made ahead; "at once, 4 ahead" shows what that is good for. What is left is counted after `close()`: processes, folders,
descriptors and threads of this process, and what the template has more than at first, before that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from mesh_core import Sandboxes

LIMITS = {"memory": 512 << 20, "pids": 64}


def one(boxes: Sandboxes, hold: threading.Barrier | None = None) -> tuple[float, float]:
    """Take a sandbox, and call it once."""
    began = time.perf_counter()
    with boxes.take(timeout=60) as box:
        taken = time.perf_counter()
        assert box.call(len, "four") == 4
        answered = time.perf_counter()
        if hold is not None:
            hold.wait()
    return taken - began, answered - began


def settle(boxes: Sandboxes, ready: int) -> None:
    """Wait until the stock is full and all that were used are gone."""
    until = time.monotonic() + 60
    while boxes.ready < ready or boxes.taken:
        if time.monotonic() > until:
            raise TimeoutError(f"{boxes!r} does not settle")
        time.sleep(0.02)
    time.sleep(0.2)


def at_once(boxes: Sandboxes, count: int, rounds: int, ready: int) -> list[tuple[float, float]]:
    """Many takers that begin together, and hold theirs until all have one."""
    found: list[tuple[float, float]] = []
    for _ in range(rounds):
        settle(boxes, ready)
        gate, hold = threading.Barrier(count), threading.Barrier(count)

        def taker(gate: threading.Barrier = gate, hold: threading.Barrier = hold) -> None:
            gate.wait()
            found.append(one(boxes, hold))

        threads = [threading.Thread(target=taker) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def figures(times: list[tuple[float, float]]) -> dict[str, float]:
    """Medians and 99th percentiles, in milliseconds."""
    found: dict[str, float] = {"sandboxes": len(times)}
    for name, column in zip(("take", "start"), zip(*times, strict=True), strict=True):
        ordered = sorted(column)
        found[f"{name} median ms"] = round(statistics.median(ordered) * 1000, 2)
        found[f"{name} p99 ms"] = round(ordered[-(-len(ordered) * 99 // 100) - 1] * 1000, 2)
        found[f"{name} longest ms"] = round(ordered[-1] * 1000, 2)
    return found


def below(pid: int | str) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = {int(child) for child in (task / "children").read_text().split()}
        except OSError:
            continue
        found |= children | {each for child in children for each in below(child)}
    return found


def template_of(boxes: Sandboxes) -> dict[str, int]:
    """What the process that forks them has: descriptors, and KiB of memory."""
    for pid in below("self"):
        if f"template of sandboxes {boxes.name!r}" in Path(f"/proc/{pid}/cmdline").read_text():
            status = Path(f"/proc/{pid}/status").read_text()
            kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
            return {"descriptors": len(os.listdir(f"/proc/{pid}/fd")), "resident KiB": int(kib)}
    raise RuntimeError("there is no template")


def own() -> dict[str, int]:
    """What this process has."""
    return {
        "processes": len(below("self")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "folders": len(list(Path(tempfile.gettempdir()).iterdir())),
    }


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="how many in a row")
    parser.add_argument("--at-once", type=int, default=64, help="how many at once")
    parser.add_argument("--rounds", type=int, default=10, help="of as many at once")
    parser.add_argument("--isolate", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--preload", nargs="*", default=["json"], help="modules that the template imports")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    load = os.getloadavg()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="sandboxes-") as folder:
        tempfile.tempdir = folder
        os.environ["TMPDIR"] = folder
        before = own()
        options = {**LIMITS, "network": None, "isolate": args.isolate, "preload": args.preload}
        with Sandboxes(**options, name="row") as boxes:
            isolation = str(boxes.isolation)
            settle(boxes, 4)
            at_first = template_of(boxes)
            began = time.perf_counter()
            found["in a row"] = figures([one(boxes) for _ in range(args.count)])
            found["in a row"]["a second"] = round(args.count / (time.perf_counter() - began), 1)
            settle(boxes, 4)
            grown = {name: value - at_first[name] for name, value in template_of(boxes).items()}
            found["at once, 4 ahead"] = figures(at_once(boxes, args.at_once, args.rounds, 4))
        with Sandboxes(**options, name="at once", most=args.at_once, ready=args.at_once) as boxes:
            found["at once"] = figures(at_once(boxes, args.at_once, args.rounds, args.at_once))
        left = {name: value - before[name] for name, value in own().items()}
    found["left"] = {**left, **{f"template's {name}": value for name, value in grown.items()}}
    for name, each in found.items():
        print(name.ljust(17), each, flush=True)
    if args.json:
        machine = {
            "kernel": platform.release(),
            "cores": os.cpu_count(),
            "load before": load,
            "load after": os.getloadavg(),
            "isolation": isolation,
        }
        args.json.write_text(json.dumps({"machine": machine, "figures": found}, indent=1) + "\n")
    sys.exit(any(left.values()))


if __name__ == "__main__":
    main()
