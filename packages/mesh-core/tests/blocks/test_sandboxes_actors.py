"""Sandboxes of actors: they belong to the actor's process, and end with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import core_sandboxes as inside
import pytest
from core_processes import Watch, family
from core_sandboxes import SOON

from mesh_core import Actor, Sandboxes, endpoint, this_host


class Coder(Actor):
    def __init__(self, mode: str) -> None:
        self.boxes = Sandboxes(network=None, isolate=inside.MODES[mode], ready=1)

    @endpoint
    async def evaluate(self, code: str) -> int:
        async with self.boxes.take_async(SOON) as box:
            return await box.call_async(eval, code, timeout=SOON)

    @endpoint
    def plant(self) -> str:
        self.box = self.boxes.take(SOON)
        os.mkfifo(self.box.folder / "fifo")
        self.fifo = os.open(self.box.folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        self.box.call(inside.plant, "daemon", str(self.box.folder / "fifo"))
        return str(self.box.folder.parent)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "end"), [("isolated", "stop"), ("isolated", "kill"), ("plain", "kill")])
@pytest.mark.usefixtures("runtime", "fault_tolerant")
def test_in_actors(mode: str, end: str) -> None:
    with this_host().spawn_procs() as procs:
        coders = procs.spawn("coders", Coder, mode)
        assert coders.evaluate.call_one("6 * 7").get(timeout=SOON) == 42
        scratch = Path(coders.plant.call_one().get(timeout=SOON))
        watch = Watch(family(procs.pids[0]))
        if end == "kill":
            os.kill(procs.pids[0], signal.SIGKILL)
        else:
            procs.stop().get(timeout=SOON)
        assert not watch.wait()
        inside.wait_until(lambda: not scratch.exists())
