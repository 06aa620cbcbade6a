"""multiprocessing in actors, with classes and functions of the script."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import multiprocessing, os, sys
from dataclasses import dataclass
from enum import Enum
from mesh_core import Actor, endpoint, this_host

class Colour(Enum):
    RED = 1

@dataclass
class Batch:
    n: int
    colour: Colour = Colour.RED

    def doubled(self):
        return Batch(self.n * 2, self.colour)

SCALE = 10

def helper(n):
    return n * SCALE

def work(batch):
    assert type(batch) is Batch and batch.colour is Colour.RED
    return Batch(helper(batch.n)), os.getpid(), sys.argv

def put(queue, batch):
    queue.put(batch.doubled())

class User(Actor):
    @endpoint
    def pool(self, method):
        with multiprocessing.get_context(method).Pool(1) as pool:
            [(batch, pid, argv), (again, _, _)] = pool.map(work, [Batch(1), Batch(2)])
        return type(batch) is type(again) is Batch and pid != os.getpid() and argv == sys.argv, batch, again

    @endpoint
    def process(self, method):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=put, args=(queue, Batch(4)))
        child.start()
        batch = queue.get()
        child.join()
        return type(batch) is Batch, batch

if __name__ == "__main__":
    with this_host().spawn_procs(start=sys.argv[1]) as procs:
        user = procs.spawn("user", User)
        for method in sys.argv[2:]:
            print(*user.pool.call_one(method).get())
            print(*user.process.call_one(method).get())
"""


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_classes_and_functions_of_the_script(script: Any, method: str) -> None:
    """Python 3.14 uses forkserver by default."""
    run = script(SCRIPT, "fork", method)
    out, err = run.finish()
    batch = "Batch(n={}, colour=<Colour.RED: 1>)"
    assert out.splitlines() == [
        f"True {batch.format(10)} {batch.format(20)}",
        f"True {batch.format(8)}",
    ], err


@pytest.mark.once
def test_in_a_process_with_its_own_interpreter(script: Any) -> None:
    out, err = (run := script(SCRIPT, "exec", "spawn")).finish()
    assert run.process.returncode == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["True", "True"]


@pytest.mark.full
@pytest.mark.beside
def test_a_data_loader(script: Any) -> None:
    pytest.importorskip("torch")
    run = script(
        """
        from mesh_core import Actor, endpoint, this_host

        class Squares:
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return index * index

        def collate(items):
            return items

        class Trainer(Actor):
            @endpoint
            def epoch(self):
                from torch.utils.data import DataLoader

                loader = DataLoader(
                    Squares(), batch_size=2, num_workers=1, collate_fn=collate, multiprocessing_context="forkserver"
                )
                return list(loader)

        if __name__ == "__main__":
            with this_host().spawn_procs() as procs:
                print(procs.spawn("trainer", Trainer).epoch.call_one().get())
        """
    )
    out, err = run.finish()
    assert out.splitlines() == ["[[0, 1], [4, 9]]"], err
