"""What a watcher costs a job: calls with nobody watching, with `mesh top`'s looks, and with those of `mesh trace`, in turn.

    python benchmarks/watching.py --out benchmarks/results/DATE-watching.json

The watcher is a process of its own, as the commands are. In each round each kind has a block of so many seconds, in another order each
time. The figure of a block is its seconds divided by its calls, so that looks that delay few calls a lot count too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from mesh_core import Actor, endpoint, this_host

WATCHER = """
import sys, threading
from mesh_core.inspect import connect

job = connect(int(sys.argv[1]))
interval, stop, looks = 0.0, threading.Event(), 0
def look():
    global looks
    while not stop.wait(interval):
        job.snapshot(pss=PSS)
        looks += 1
for line in sys.stdin:
    interval, PSS = float(line), line.startswith("1")
    if interval:
        looks = 0
        stop.clear()
        thread = threading.Thread(target=look)
        thread.start()
        print("on", flush=True)
    else:
        stop.set()
        thread.join()
        print(looks, flush=True)
"""
KINDS = {"nobody": 0.0, "mesh top (1 s)": 1.0, "mesh trace (0.1 s)": 0.1}


class Echo(Actor):
    """Says what it is told."""

    @endpoint
    def echo(self, value: int) -> int:
        return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--procs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    looks: dict[str, int] = defaultdict(int)
    with this_host().spawn_procs({"gpus": args.procs}, name="workers") as procs:
        one = procs.spawn("echoes", Echo).slice(gpus=0)
        one.echo.call_one(0).get(timeout=30)
        words = [sys.executable, "-c", WATCHER, str(os.getpid())]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
            stdin, stdout = watcher.stdin, watcher.stdout
            assert stdin is not None and stdout is not None

            def tell(interval: float) -> str:
                stdin.write(f"{interval}\n")
                stdin.flush()
                return stdout.readline()

            for number in range(args.rounds):
                kinds = list(KINDS)
                kinds = kinds[number % 3 :] + kinds[: number % 3]
                for kind in kinds:
                    if KINDS[kind]:
                        tell(KINDS[kind])
                    begun, count = time.perf_counter(), 0
                    while (took := time.perf_counter() - begun) < args.seconds:
                        one.echo.call_one(count).get()
                        count += 1
                    found[kind].append(took / count)
                    if KINDS[kind]:
                        looks[kind] += int(tell(0.0))
            stdin.close()
    result = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "rounds": args.rounds,
        "seconds": args.seconds,
        "procs": args.procs,
        "kinds": {
            kind: {
                "us_per_call": round(statistics.median(times) * 1e6, 2),
                "cost": round(
                    statistics.median(a / b for a, b in zip(times, found["nobody"], strict=True)) - 1, 4
                ),
                "looks": looks[kind],
                "all_us": [round(each * 1e6, 2) for each in times],
            }
            for kind, times in found.items()
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
