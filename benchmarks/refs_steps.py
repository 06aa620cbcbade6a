"""`put` and `get` of one large array in one process: what each step takes. With Ray, in an environment that has it:

    python benchmarks/refs_steps.py [--mib 256] [--rounds 9]

`refs.py` has the same with Mesh. The first round is told apart: all memory is new then.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MIB = 1 << 20


def steps(mib: int, rounds: int, put: Callable[[Any], Any], get: Callable[[Any], Any]) -> dict[str, Any]:
    """One array, in one process: milliseconds of each step."""
    data = np.random.default_rng(0).integers(0, 255, mib * MIB, dtype="uint8")
    warm = np.zeros_like(data)

    def touch(array: Any) -> int:
        return int(array[::4096].sum())

    def once() -> dict[str, float]:
        took: dict[str, float] = {}

        def step(name: str, run: Callable[..., Any], *args: Any) -> Any:
            begun = time.perf_counter()
            out = run(*args)
            took[name] = 1000 * (time.perf_counter() - begun)
            return out

        step("np.copyto into warm memory", np.copyto, warm, data)
        ref = step("put", put, data)
        for nth in ("", "second "):
            value = step(f"{nth}get", get, ref)
            step(f"{nth}touch of every page", touch, value)
            del value
        took["put, get and touch"] = took["put"] + took["get"] + took["touch of every page"]
        return took

    first, *later = [once() for _ in range(rounds + 1)]
    return {
        "first": {name: round(took, 2) for name, took in first.items()},
        "least": {name: round(min(each[name] for each in later), 2) for name in first},
        "median": {name: round(statistics.median(each[name] for each in later), 2) for name in first},
    }


def main() -> None:
    """Measure Ray, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    import ray

    memory = 4 * options.mib * MIB
    ray.init(num_cpus=1, object_store_memory=memory, logging_level="ERROR", include_dashboard=False)
    print(json.dumps(steps(options.mib, options.rounds, ray.put, ray.get), indent=1))


if __name__ == "__main__":
    main()
