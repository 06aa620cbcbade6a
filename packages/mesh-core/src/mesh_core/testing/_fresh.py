"""What a plugin costs a process that has just begun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from mesh_core._system.interpreter import python_command

HEAVY = (
    "cupy",
    "jax",
    "matplotlib",
    "numpy",
    "pandas",
    "polars",
    "pyarrow",
    "scipy",
    "sklearn",
    "tensorflow",
    "torch",
    "transformers",
    "triton",
)
"""Modules that take a noticeable part of a second to import."""
_TRIES = 3
"""A busy machine is no fault of the plugin: the best one counts."""
_SCRIPT = """
import json, sys, time
from mesh_core.plugins import PluginManager
group, name, distribution, *heavy = sys.argv[1:]
manager = PluginManager(warn=lambda error: None)
kind = next((each for each in manager.kinds() if each.group == group), None)
offered = [] if kind is None else [(each.name, each.distribution) for each in manager.entries(kind)]
if (name, distribution) not in offered:
    print("null")
    sys.exit()
before = set(sys.modules)
began = time.perf_counter()
plugin = manager.get(kind, name, distribution=distribution)
loaded = time.perf_counter()
imported = sorted(set(heavy) & (set(sys.modules) - before))
plugin.probe()
print(json.dumps([loaded - began, imported, time.perf_counter() - loaded]))
"""


@dataclass(frozen=True)
class Cost:
    """What it took to load a plugin, and to probe it."""

    load_s: float
    heavy: tuple[str, ...]
    """The heavy modules that were imported to load it."""
    probe_s: float


def cost_of(group: str, name: str, distribution: str, limit_s: float) -> Cost | None:
    """Load and probe a plugin in new processes, until both stay below the limit. ``None`` if it is not installed for those."""
    best: Cost | None = None
    for _ in range(_TRIES):
        done = subprocess.run(
            python_command(_SCRIPT, group, name, distribution, *HEAVY),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (
            f"the plugin cannot be loaded and probed in a new process:\n{done.stderr}"
        )
        # A probe may print.
        found = json.loads(done.stdout.splitlines()[-1])
        if found is None:
            return None
        cost = Cost(found[0], tuple(found[1]), found[2])
        best = (
            cost
            if best is None
            else Cost(min(best.load_s, cost.load_s), cost.heavy, min(best.probe_s, cost.probe_s))
        )
        if best.load_s <= limit_s and best.probe_s <= limit_s:
            break
    return best
