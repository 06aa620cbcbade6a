"""Code written for torchrun runs in the processes of a mesh as it is."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_core import (
    Actor,
    ActorError,
    Channel,
    MeshError,
    Port,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
    this_host,
)

torch = pytest.importorskip("torch")

from mesh_tensor import Mesh, distribute, fetch, spmd  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]

LIMIT = 120

TRAINING = """
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def train(steps):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = train(int(sys.argv[2]))
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump({"losses": losses, "local": os.environ["LOCAL_RANK"], "argv": sys.argv}, file)
    dist.destroy_process_group()
"""


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def steps(model: Any, inputs: Any, make: Any, mean: Any = float) -> list[float]:
    optimizer = make(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean(loss.detach()))
    return losses


def inputs() -> Any:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def fully_sharded() -> list[float]:
    """Train with FSDP2."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one = model()
    for each in (one[0], one[2], one):
        fully_shard(each, mesh=mesh)

    def mean(loss: Any) -> float:
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    part = inputs().chunk(dist.get_world_size())[dist.get_rank()]
    return steps(one, part, torch.optim.AdamW, mean)


def product() -> Any:
    """Multiply with DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).view(4, 3)
    return (distribute_tensor(x, mesh, [Shard(0)]) @ distribute_tensor(x.t(), mesh, [Shard(1)])).full_tensor()


def total(n: int) -> int:
    import torch.distributed as dist

    x = torch.tensor(n * (dist.get_rank() + 1))
    dist.all_reduce(x)
    return int(x)


def fail_on_one() -> None:
    """Have one rank raise while the other waits for it."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise LookupError("no such batch")
    dist.barrier()


def die_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def offer_late(folder: Path) -> None:
    """Offer gloo under another name, where rank 1 sees late that it is connected."""
    import torch.distributed as dist

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        group = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        if rank == 1:
            until((folder / "go").exists)
        return group

    dist.Backend.register_backend("late", create, devices=["cpu"])


def write_down(folder: Path) -> int:
    """Do all that there is to do, without the others."""
    import torch.distributed as dist

    rank = dist.get_rank()
    (folder / f"done by {rank}").touch()
    return rank


def until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not met():
        assert time.monotonic() < end
        time.sleep(0.001)


class Beside(Actor):
    @endpoint
    def is_in_group(self) -> bool:
        return torch.distributed.is_initialized()


class Environment(Actor):
    @endpoint
    def get(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]


@pytest.fixture(scope="module")
def job(procs: ProcMesh) -> spmd.SPMD:
    return spmd.setup(procs)


def test_actors_find_what_torchrun_sets(job: spmd.SPMD) -> None:
    actors = job.procs.spawn("environment", Environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
    first, second = actors.get.call(*names).get(timeout=LIMIT).values()
    assert first[:5] == ["0", "2", "0", "2", "127.0.0.1"]
    assert second[:5] == ["1", "2", "1", "2", "127.0.0.1"]
    assert first[5] == second[5] is not None


def test_ranks_of_a_slice(procs: ProcMesh) -> None:
    alone = spmd.setup(procs.slice(gpus=slice(1, 2)))
    assert alone.run(total, 7).get(timeout=LIMIT).values() == [7]
    assert spmd.setup(procs).run(total, 7).get(timeout=LIMIT).values() == [21, 21]


def test_fully_sharded_training_equals_one_process(job: spmd.SPMD) -> None:
    alone = steps(model(), inputs(), torch.optim.AdamW)
    for found in job.run(fully_sharded).get(timeout=LIMIT).values():
        assert found == pytest.approx(alone, rel=1e-5)


def test_distributed_tensors(job: spmd.SPMD) -> None:
    x = torch.arange(12.0).view(4, 3)
    for found in job.run(product).get(timeout=LIMIT).values():
        torch.testing.assert_close(found, x @ x.t())


def test_a_data_parallel_script_equals_one_process(job: spmd.SPMD, tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "losses.json"
    script.write_text(TRAINING)
    assert job.main(script, out, 4).get(timeout=LIMIT).values() == [0, 0]
    told = json.loads(out.read_text())
    assert told["losses"] == pytest.approx(steps(model(), inputs(), torch.optim.SGD), rel=1e-5)
    assert (told["local"], told["argv"]) == ("0", [str(script), str(out), "4"])
    # Again: nothing is left of the first.
    assert job.main(script, out, 1).get(timeout=LIMIT).values() == [0, 0]


def test_exit_statuses(job: spmd.SPMD, tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import os, sys\n"
        "sys.exit({'number': 3 + int(os.environ['RANK']), 'none': None, 'text': 'that is all'}[sys.argv[1]])\n"
    )
    for how, statuses in (("number", [3, 4]), ("none", [0, 0]), ("text", [1, 1])):
        assert job.main(script, how).get(timeout=LIMIT).values() == statuses


def test_a_module_by_its_name(job: spmd.SPMD) -> None:
    assert job.main("this", module=True).get(timeout=LIMIT).values() == [0, 0]
    with pytest.raises(ImportError, match="no_such_module"):
        job.main("no_such_module", module=True).get(timeout=LIMIT)


def test_no_rank_leaves_before_all_have_joined(procs: ProcMesh, tmp_path: Path) -> None:
    """SPD-2: connections that another rank is still making are not closed."""
    beside: Any = procs.slice(gpus=0).spawn("beside", Beside)
    procs.run(offer_late, tmp_path).get(timeout=LIMIT)
    running = spmd.setup(procs, backend="late").run(write_down, tmp_path)
    until((tmp_path / "done by 0").exists)
    assert all(beside.is_in_group.call_one().get(timeout=LIMIT) for _ in range(50))
    assert not (tmp_path / "done by 1").exists()
    (tmp_path / "go").touch()
    assert running.get(timeout=LIMIT).values() == [0, 1]
    assert not beside.is_in_group.call_one().get(timeout=LIMIT)
    beside.stop().get(timeout=LIMIT)


def test_a_failing_rank_is_named_and_waited_for_by_none(job: spmd.SPMD) -> None:
    """SPD-1."""
    future = job.run(fail_on_one)
    with pytest.raises(ActorError) as caught:
        future.get(timeout=LIMIT)
    one, other = caught.value.results.values()
    assert isinstance(other, LookupError)
    assert isinstance(other, ActorError)
    assert other.rank == 1
    assert "raise LookupError" in other.remote_traceback
    assert isinstance(one, MeshError)
    assert "rank 1 had failed first, with LookupError: no such batch" in str(one)
    assert job.run(total, 1).get(timeout=LIMIT).values() == [3, 3]


def test_a_rank_that_fails_before_the_others_meet_it(job: spmd.SPMD, tmp_path: Path) -> None:
    script = tmp_path / "early.py"
    script.write_text(
        "import os\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise KeyError('too early')\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
    )
    with pytest.raises(ActorError) as caught:
        job.main(script).get(timeout=LIMIT)
    one, other = caught.value.results.values()
    assert "rank 1 had failed first, with KeyError: 'too early'" in str(one)
    assert isinstance(other, KeyError)
    assert job.run(total, 1).get(timeout=LIMIT).values() == [3, 3]


class Trainer(spmd.SPMDActor):
    def __init__(self) -> None:
        super().__init__()
        from torch.nn.parallel import DistributedDataParallel

        self.model = DistributedDataParallel(model())

    @endpoint
    def train(self) -> list[float]:
        import torch.distributed as dist

        def mean(loss: Any) -> float:
            dist.all_reduce(loss)
            return float(loss) / 2

        return steps(self.model, inputs().chunk(2)[dist.get_rank()], torch.optim.SGD, mean)


def test_actors_in_a_group(job: spmd.SPMD) -> None:
    alone = steps(model(), inputs(), torch.optim.SGD)
    for _ in range(2):
        trainers = job.procs.spawn("trainers", Trainer)
        for found in trainers.train.call().get(timeout=LIMIT).values():
            assert found == pytest.approx(alone, rel=1e-5)
        with pytest.raises(MeshError, match="has a default process group already"):
            job.run(total, 1).get(timeout=LIMIT)
        # That has not ended the actors' group.
        assert len(trainers.train.call().get(timeout=LIMIT)) == 2
        trainers.stop().get(timeout=LIMIT)
    assert job.run(total, 1).get(timeout=LIMIT).values() == [3, 3]


class Unfinished(spmd.SPMDActor):
    def __init__(self, joined: Port[int], gates: Path) -> None:
        super().__init__()
        rank = current_rank().rank
        joined.send(rank)
        (gates / str(rank)).read_bytes()
        raise OSError("no data")


def test_an_actor_whose_constructor_fails_leaves_its_group(job: spmd.SPMD, tmp_path: Path) -> None:
    for rank in range(2):
        os.mkfifo(tmp_path / str(rank))
    port, joined = Channel[int].open()
    actors = job.procs.spawn("unfinished", Unfinished, port, tmp_path, supervise=lambda _: True)
    # None leaves before all have joined: the others would fail to join, which is another error.
    for _ in range(2):
        joined.recv().get(timeout=LIMIT)
    for rank in range(2):
        (tmp_path / str(rank)).write_bytes(b"")
    with pytest.raises(MeshError, match="no data"):
        actors.initialized.get(timeout=LIMIT)
    actors.stop().get(timeout=LIMIT)
    assert job.run(total, 1).get(timeout=LIMIT).values() == [3, 3]


def test_a_dead_rank(runtime: None, preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=preload, supervise=lambda _: True) as procs:
        with pytest.raises(MeshError, match=r"call spmd\.setup"):
            procs.spawn("early", Trainer, supervise=lambda _: True).initialized.get(timeout=LIMIT)
        job = spmd.setup(procs)
        with pytest.raises((SupervisionError, ActorError, MeshError)):
            job.run(die_on_one).get(timeout=LIMIT)
        procs.respawn().get(timeout=LIMIT)
        assert spmd.setup(procs).run(total, 2).get(timeout=LIMIT).values() == [6, 6]


def end_on_one() -> None:
    import sys

    import torch.distributed as dist

    if dist.get_rank() == 1:
        sys.exit(5)
    dist.barrier()


def test_a_function_that_ends_its_program(job: spmd.SPMD) -> None:
    with pytest.raises(ActorError) as caught:
        job.run(end_on_one).get(timeout=LIMIT)
    one, other = caught.value.results.values()
    assert "rank 1 had failed first, with SystemExit: 5" in str(one)
    assert other.cause_type is SystemExit
    assert job.run(total, 1).get(timeout=LIMIT).values() == [3, 3]


def test_bad_arguments(job: spmd.SPMD) -> None:
    with pytest.raises(TypeError, match="takes a function, got 3"):
        job.run(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be positive"):
        spmd.setup(job.procs, timeout=0)
    with pytest.raises(FileNotFoundError):
        job.main("/no/such/script.py").get(timeout=LIMIT)


def test_a_mesh_of_the_global_view_goes_on_when_its_processes_have_left_their_default_group(
    preload: list[str],
) -> None:
    """PyTorch then forgets the names of all groups."""
    with (
        this_host().spawn_procs({"data": 2}, preload=preload) as procs,
        Mesh((2,), ("data",), procs) as mesh,
    ):
        x = distribute(torch.arange(4.0), mesh, ["data"])
        assert float(fetch(x.sum() * 1)) == 6
        ranks = spmd.setup(procs)
        assert ranks.run(torch.distributed.get_rank).get(timeout=LIMIT).values() == [0, 1]
        assert float(fetch((x + 1).sum() * 1)) == 10


def test_a_start_timeout_must_be_positive(procs: ProcMesh) -> None:
    with pytest.raises(ValueError, match="start_timeout must be positive, got 0"):
        spmd.setup(procs, start_timeout=0)
