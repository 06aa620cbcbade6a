"""Throws the garbage of the network tests, when told to: `python -m meshbench.thrower HOST:PORT CONNECTIONS SECONDS`.

It says `ready`, waits for a line on stdin, throws with the lowest priority, evenly over so many seconds, and ends with what
became of the connections, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2] / "tests" / "network"
_PATIENCE = 0.5
"""Seconds that a silent connection is kept open."""


def main() -> None:
    """Get ready, wait, throw, tell.

    Example:
        echo | python -m meshbench.thrower 127.0.0.1:7171 1000 5
    """
    address, connections, seconds = sys.argv[1:]
    host, _, port = address.rpartition(":")
    os.nice(19)
    sys.path.insert(0, str(_TESTS))
    garbage = import_module("garbage")
    print("ready", flush=True)
    sys.stdin.readline()
    report = garbage.flood(
        (host, int(port)), connections=int(connections), over=float(seconds), patience=_PATIENCE
    )
    outcomes: Counter[str] = sum(report.outcomes.values(), Counter())
    print(json.dumps(outcomes), flush=True)
    # Not the interpreter's leisurely end: that it is gone tells that all is thrown.
    os._exit(0)


if __name__ == "__main__":
    main()
