"""Large arguments and results between hosts: past the agents, as mesh-rdma moves them, and through the agents, in turn.

    python benchmarks/messages.py --rounds 5 --json messages.json

Each round starts a script for each of the two, with two agents on this machine, and takes the median of `--calls` calls of each
size. What the call itself costs, beside its data, is in the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

ROADS = {"past the agents": "1MiB", "through the agents": "0"}
MIB = 1 << 20

SCRIPT = """
import json, statistics, sys, time
from mesh_core import Actor, endpoint
from mesh_core._common.current import current
from mesh_core.testing import LocalCluster

class Far(Actor):
    @endpoint
    def take(self, data): return len(data)
    @endpoint
    def give(self, size): return bytearray(size)

def timed(call):
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun

sizes, calls = json.loads(sys.argv[1]), int(sys.argv[2])
with LocalCluster(hosts=1) as cluster:
    far = cluster.attach().spawn_procs().spawn("far", Far)
    found = {}
    for size in sizes:
        data = bytearray(size)
        take = lambda: far.take.call_one(data).get(timeout=100)
        give = lambda: far.give.call_one(size).get(timeout=100)
        for _ in range(4): take(), give()
        found[size] = [statistics.median(timed(each) for _ in range(calls)) for each in (take, give)]
    found["came"] = current().runtime.counts()["parts_past_gateways"]
print(json.dumps(found))
"""


def measure(sizes: list[int], calls: int, threshold: str) -> dict[str, list[float]]:
    """The seconds that arguments and results of each size take, by one of the roads."""
    words = [sys.executable, "-c", SCRIPT, json.dumps(sizes), str(calls)]
    env = {**os.environ, "MESH_BYPASS_THRESHOLD": threshold}
    said = subprocess.run(words, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    if bool(found.pop("came")) != (threshold != "0"):
        raise SystemExit("the data did not take the road that it was to take: is mesh-rdma installed?")
    return found


def main() -> None:
    """Measure in turn, and write medians of the rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--mib", type=int, nargs="+", default=[2, 16, 256])
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    sizes = [mib * MIB for mib in options.mib]
    rounds = [
        {road: measure(sizes, options.calls, at) for road, at in ROADS.items()} for _ in range(options.rounds)
    ]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size in sizes:
        for nth, what in enumerate(("argument", "result")):
            rates = {
                road: statistics.median(size / each[road][str(size)][nth] for each in rounds)
                for road in ROADS
            }
            past, through = ROADS
            ratio = statistics.median(
                each[through][str(size)][nth] / each[past][str(size)][nth] for each in rounds
            )
            found.setdefault(f"{size // MIB} MiB", {})[what] = {**rates, "ratio": ratio}
            shown = ", ".join(f"{road} {rate / 1e9:.2f} GB/s" for road, rate in rates.items())
            print(f"{size // MIB} MiB, {what}: {shown}, {ratio:.2f} times as fast")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"machine": platform.platform(), "cores": os.cpu_count(), "found": found}, file, indent=1
            )


if __name__ == "__main__":
    main()
