"""A script that is busy with a mesh until it is killed; `test_controller_death.py` kills it.

    python tests/stress/victim.py SEED ENDING

It prints a line once it is under way. With the endings `raise`, `exit` and `return` it ends itself, at a moment that
the seed picks; otherwise it goes on until a signal comes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from typing import Any, Literal

from mesh_core import Actor, MeshError, endpoint, this_host


class Worker(Actor):
    """Something to be busy with."""

    @endpoint
    def spin(self, seconds: float) -> float:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return seconds

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


def main() -> None:
    """Spawn, call and stop, and end in the way that was asked for."""
    # Whoever runs the tests in the background, or by nohup, has it ignore signals, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_DFL)
    rng, ending = random.Random(int(sys.argv[1])), sys.argv[2]
    end = time.monotonic() + rng.random() * 0.7 if ending in {"raise", "exit", "return"} else float("inf")
    stop = threading.Event()

    def crew(seed: int) -> None:
        mine = random.Random(seed)
        while not stop.is_set():
            try:
                start: Literal["fork", "exec"] = "exec" if mine.random() < 0.3 else "fork"
                procs = this_host().spawn_procs({"gpus": mine.randint(1, 4)}, start=start)
                workers: Any = procs.spawn("worker", Worker)
                workers.spin.broadcast(0.2)
                workers.echo.call(bytearray(mine.choice([1, 1 << 20])))
                if mine.random() < 0.5:
                    workers.spin.call(0.05).get(60)
                if mine.random() < 0.7:
                    procs.stop()
                stop.wait(mine.random() / 10)
            except MeshError:
                return  # the script has ended meanwhile

    threads = [threading.Thread(target=crew, args=(rng.random(),), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    print("under way", flush=True)
    while time.monotonic() < end:
        stop.wait(min(0.01, max(0.0, end - time.monotonic())))
    if ending == "raise":
        raise RuntimeError("the script fails")
    if ending == "exit":
        os._exit(7)
    # The threads are daemons and go on while the interpreter ends.


if __name__ == "__main__":
    main()
