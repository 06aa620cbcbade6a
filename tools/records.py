"""What test runners leave for the end of `./dev test`: the tests that failed, how to run each again, and the slowest.

`./dev test` names a folder in MESH_RUN. Each runner writes one file there (`run_record.py` for pytest, `cargo_test.py`
for cargo); `again.py` reads them.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

VARIABLE = "MESH_RUN"


@dataclass(frozen=True)
class Failure:
    """A test that failed."""

    name: str
    reason: str
    command: list[str]
    """What runs it again, and nothing else."""
    times: int = 1
    """How often its runner counted it: a test may fail, and its teardown too."""
    detail: str = ""
    """The end of what its runner said of it."""


@dataclass(frozen=True)
class Record:
    """What one runner left."""

    session: str
    path: str
    """Its PATH: the environment of its session comes first there."""
    failures: list[Failure] = field(default_factory=list)
    slowest: list[tuple[str, float]] = field(default_factory=list)
    """Names and seconds."""

    def write(self, folder: Path) -> None:
        """Leave it in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{uuid.uuid4().hex}.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @property
    def environment(self) -> dict[str, str]:
        """What to run its tests in again; such a run leaves no record of its own."""
        return {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PATH": self.path}


def folder_of_this_run() -> Path | None:
    """Where to leave a record, if anybody wants one."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def session_of_this_run() -> str:
    """What nox calls the session that this process belongs to."""
    return os.environ.get("NOX_CURRENT_SESSION", "")


def read_all(folder: Path) -> Iterator[Record]:
    """What all runners left, in the order in which they ended."""
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw["failures"] = [Failure(**failure) for failure in raw["failures"]]
        raw["slowest"] = [(name, seconds) for name, seconds in raw["slowest"]]
        yield Record(**raw)
