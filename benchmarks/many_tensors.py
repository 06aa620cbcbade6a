"""Messages of many small tensors to another process of this host, beside one tensor of as many bytes and beside pickles.

    python benchmarks/many_tensors.py --rounds 5 --json many_tensors.json

Needs torch and numpy. Each round starts a script that sends each message `--calls` times, in turn with what it is compared to, and
takes the medians. What it is compared to stays in the script: `torch.save` with `torch.load`, and numpy arrays of the tensors,
pickled, loaded and made tensors again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys

SCRIPT = """
import dataclasses, gc, io, json, pickle, statistics, sys, time
import torch
from mesh_core import Actor, endpoint, this_host

class Sink(Actor):
    @endpoint
    def take(self, data): return len(data) if hasattr(data, "__len__") else 1

def timed(call):
    gc.collect()  # so that none pays for what another has left
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun

def saved(tensors):
    file = io.BytesIO()
    torch.save(tensors, file)
    return file

def loaded(file):
    file.seek(0)
    return torch.load(file)

def through_numpy(tensors):
    data = pickle.dumps({name: each.numpy() for name, each in tensors.items()}, 5)
    return {name: torch.from_numpy(each) for name, each in pickle.loads(data).items()}

@dataclasses.dataclass
class Layer:
    weight: torch.Tensor
    bias: torch.Tensor

def state(count, size):
    return {f"layers.{number}.weight": torch.randn(size) for number in range(count)}

calls = int(sys.argv[1])
torch.set_num_threads(1)
with this_host().spawn_procs() as procs:
    sink = procs.spawn("sink", Sink)
    send = lambda data: sink.take.call_one(data).get(timeout=300)
    small, tiny, mixed = state(2000, 4096), state(20000, 8), state(2000, 2048)
    mixed.update((f"big.{number}", torch.randn(1 << 20)) for number in range(4))
    arrays = {name: each.numpy() for name, each in small.items()}
    nested = {"layers": [[Layer(each, each[:8]) for each in list(small.values())[start:start + 100]] for start in range(0, 2000, 100)]}
    work = {
        "one tensor of 32 MiB": lambda: send(one),
        "dict of 2,000 tensors of 16 KiB": lambda: send(small),
        "torch.save and load of that dict": lambda: loaded(saved(small)),
        "torch.save of that dict": lambda: saved(small),
        "dict of 2,000 arrays of 16 KiB": lambda: send(arrays),
        "lists of 2,000 data classes of 16 KiB and 32 B": lambda: send(nested),
        "dict of 2,000 tensors of 8 KiB and 4 of 4 MiB": lambda: send(mixed),
        "dict of 20,000 tensors of 32 B": lambda: send(tiny),
        "those pickled as numpy": lambda: through_numpy(tiny),
    }
    one = torch.randn(32 << 18)
    found = {name: [] for name in work}
    for number in range(calls + 1):
        for name, call in work.items():
            took = timed(call)
            if number:
                found[name].append(took)
print(json.dumps({name: statistics.median(each) for name, each in found.items()}))
"""

ONE, DICT, NUMPY = "one tensor of 32 MiB", "dict of 2,000 tensors of 16 KiB", "those pickled as numpy"
RATIOS = {
    f"{DICT} / {ONE}": (DICT, ONE, 4.0),
    f"{DICT} / torch.save of that dict": (DICT, "torch.save of that dict", None),
    f"dict of 2,000 arrays of 16 KiB / {ONE}": ("dict of 2,000 arrays of 16 KiB", ONE, 4.0),
    f"dict of 20,000 tensors of 32 B / {NUMPY}": ("dict of 20,000 tensors of 32 B", NUMPY, 0.5),
}
"""Of what to what, and what it must not exceed."""


def measure(calls: int) -> dict[str, float]:
    """The seconds that each takes, in one script."""
    words = [sys.executable, "-c", SCRIPT, str(calls)]
    said = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    """Measure, and write medians of the rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    load = os.getloadavg()
    rounds = [measure(options.calls) for _ in range(options.rounds)]
    took = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    ratios = {
        name: statistics.median(each[of] / each[to] for each in rounds)
        for name, (of, to, _) in RATIOS.items()
    }
    for name, seconds in took.items():
        print(f"| {name} | {1000 * seconds:.1f} ms |")
    for name, ratio in ratios.items():
        most = RATIOS[name][2]
        print(f"| {name} | {ratio:.2f} | {'' if most is None else f'at most {most}'} |")
    print(f"load before {load[0]:.1f}, after {os.getloadavg()[0]:.1f}")
    if options.json:
        with open(options.json, "w") as file:
            told = {"machine": platform.platform(), "cores": os.cpu_count(), "took": took, "ratios": ratios}
            json.dump(told, file, indent=1)


if __name__ == "__main__":
    main()
