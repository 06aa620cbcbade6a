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
_OF_START = 2
"""On a slow machine, such as an emulated one, it may take so many times as long as it takes to import ``mesh_core.plugins``."""
_SCRIPT = """
import json, sys, time
start = time.perf_counter()
from mesh_core.plugins import PluginManager
start = time.perf_counter() - start
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
print(json.dumps([loaded - began, imported, time.perf_counter() - loaded, start]))
"""


@dataclass(frozen=True)
class Cost:
    """What it took to load a plugin, and to probe it."""

    load_s: float
    heavy: tuple[str, ...]
    """The heavy modules that were imported to load it."""
    probe_s: float
    limit_s: float
    """What each may take."""

    @property
    def is_low(self) -> bool:
        """Whether both take no longer than they may."""
        return max(self.load_s, self.probe_s) <= self.limit_s


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
        load_s, heavy, probe_s, start_s = found
        cost = Cost(load_s, tuple(heavy), probe_s, max(limit_s, _OF_START * start_s))
        if best is None or max(cost.load_s, cost.probe_s) < max(best.load_s, best.probe_s):
            best = cost
        if best.is_low or best.heavy:
            break
    return best
