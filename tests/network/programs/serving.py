"""How a controller serves a test: a request a line on stdin, an answer a line on stdout, JSON both.

Requests run side by side, each on a thread of its own. `agents.Job` is the other end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from mesh_core import shutdown


def run(kind: Callable[..., Any]) -> None:
    """Attach as the first argument says, then serve requests until stdin ends."""
    # What the procs print goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lock = threading.Lock()

    def answer(number: int, key: str, value: Any) -> None:
        with lock:
            answers.write(json.dumps({"number": number, key: value}) + "\n")
            answers.flush()

    try:
        job = kind(**json.loads(sys.argv[1]))
    except Exception as error:
        answer(0, "error", f"{type(error).__name__}: {error}")
        shutdown()
        return
    answer(0, "value", len(job.hosts))

    def serve(number: int, what: str, options: dict[str, Any]) -> None:
        try:
            answer(number, "value", getattr(job, f"do_{what}")(**options))
        except Exception as error:
            answer(number, "error", f"{type(error).__name__}: {error}")

    for line in sys.stdin:
        threading.Thread(target=serve, args=json.loads(line), daemon=True).start()
    shutdown()
