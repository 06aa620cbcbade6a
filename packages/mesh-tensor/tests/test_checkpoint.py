"""States are saved and loaded: whole, as they were at that line, and on meshes of other shapes."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_core import DeviceMeshError, ProcMesh, configured, this_host

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: E402

from mesh_tensor import (  # noqa: E402
    CheckpointError,
    ColumnParallel,
    FullyShard,
    Mesh,
    RemoteException,
    activate,
    distribute,
    export_safetensors,
    fetch,
    fetch_shard,
    load,
    module_to_mesh,
    rank_tensor,
    remote,
    save,
    share,
    slice_mesh,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def test_each_process_gets_back_what_it_had_at_that_line(procs: ProcMesh, tmp_path: Path) -> None:
    x = rank_tensor(procs, "gpus") * 10
    done = save(
        {"deep": {"x": x, 3: [x + 1, "word"]}, "step": 7, "local": torch.arange(3)}, tmp_path / "last"
    )
    x += 5
    assert done.get(timeout=60) == tmp_path / "last"
    local = torch.zeros(3, dtype=torch.int64)
    y = x + 0
    found = load({"deep": {"x": x, 3: [y, ""]}, "step": 0, "local": local}, tmp_path / "last")
    assert found["step"] == 7
    assert found["deep"][3][1] == "word"
    assert [int(each) for each in fetch(x).values()] == [0, 10]
    assert [int(each) for each in fetch(y).values()] == [1, 11]
    assert local.tolist() == [0, 1, 2]
    assert _names(tmp_path) == ["last"]
    with pytest.raises(CheckpointError, match="each its own"):
        load({"deep": {"x": torch.tensor(0)}}, tmp_path / "last")


@pytest.mark.full
def test_save_and_load_show_how_far_they_are(
    procs: ProcMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rank_tensor(procs, "gpus") * 10
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    @remote(propagate=lambda _: None)
    def held(path: str) -> None:
        os.close(os.open(path, os.O_RDONLY))

    def shown_by(function: Callable[[], Any]) -> str:
        """What is shown while the processes are held, until they are let go."""
        # Not what pytest captures: reading that may lose what is written meanwhile.
        screen = io.StringIO()
        monkeypatch.setattr(sys, "stderr", screen)
        with activate(procs):
            held(str(gate))

        def wait() -> None:
            with configured(progress="ON"):
                function()

        waiting = threading.Thread(target=wait)
        waiting.start()
        until = time.monotonic() + 30
        try:
            while "\n" not in screen.getvalue() and time.monotonic() < until:
                time.sleep(0.01)
        finally:
            # This does not wait for a reader, and readers do not wait once it is open.
            opened = os.open(gate, os.O_RDWR)
            waiting.join(60)
            os.close(opened)
        assert not waiting.is_alive()
        return screen.getvalue()

    save_it = shown_by(lambda: save({"x": x}, tmp_path / "last").get(timeout=60))
    load_it = shown_by(lambda: load({"x": x}, tmp_path / "last"))
    # Lines follow each other after ten seconds, if they are no terminal's.
    assert re.fullmatch(r"save last: waits until the tensors are there, \d+ s\n", save_it)
    assert re.fullmatch(r"load last, \d+ s\n", load_it)


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left on device: '{path}'"),
        # As PyTorch reports it.
        (RuntimeError("[enforce fail at x.cc:671]"), r"{path} could not be written, .*: \[enforce fail .* bytes free"),
    ],
)  # fmt: skip
def test_a_full_disk_is_named_with_the_checkpoint(
    raised: Exception, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_data(*_: Any) -> Any:
        raise raised

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    with pytest.raises((OSError, CheckpointError), match=text.format(path=tmp_path / "last")):
        save({"x": torch.ones(3)}, tmp_path / "last").get(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_with_the_exported_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"x": torch.ones(3)}, tmp_path / "last").get(timeout=60)

    def fsync(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/x.safetensors'"):
        export_safetensors(tmp_path / "last", tmp_path / "x.safetensors")


def test_the_last_save_to_a_path_stays(procs: ProcMesh, tmp_path: Path) -> None:
    big = share(torch.ones(1 << 21), procs)
    first = save({"x": big, "step": 1}, tmp_path / "a")
    second = save({"step": 2}, tmp_path / "a")
    assert first.get(timeout=60) == second.get(timeout=60)
    assert load({"step": 0}, tmp_path / "a") == {"step": 2}
    assert _names(tmp_path) == ["a"]


def test_on_another_number_of_processes_it_is_said_whose_each_gets(
    procs: ProcMesh, grid: ProcMesh, tmp_path: Path
) -> None:
    save({"x": rank_tensor(procs, "gpus") * 10}, tmp_path / "two").get(timeout=60)
    x = share(torch.tensor(-1), grid)
    with pytest.raises(CheckpointError, match=r"saved by 2 processes.* has 4: say with ranks="):
        load({"x": x}, tmp_path / "two")
    with pytest.raises(CheckpointError, match="a number from 0 to 1 for each of the 4"):
        load({"x": x}, tmp_path / "two", ranks=[0, 1, 2, 0])
    load({"x": x}, tmp_path / "two", ranks=[0, 1, 1, 0])
    assert [int(each) for each in fetch(x).values()] == [0, 10, 10, 0]


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def _step(model: Any, optimizer: Any, x: Any) -> float:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_a_training_goes_on_on_a_mesh_of_another_shape(
    grid: ProcMesh, procs: ProcMesh, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    x = torch.randn(8, 6)
    losses = []
    with Mesh((2, 2), ("data", "model"), grid) as mesh:
        model = module_to_mesh(_model(), mesh, {"": FullyShard("data"), "0": ColumnParallel("model")})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        spread = distribute(x, mesh, ["data", None])
        _step(model, optimizer, spread)
        done = save({"model": model, "optimizer": optimizer, "step": 1}, tmp_path / "one")
        losses = [_step(model, optimizer, spread) for _ in range(2)]
        done.get(timeout=60)
    with Mesh((2,), ("data",), procs) as mesh:
        model = module_to_mesh(
            nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)), mesh, {"": FullyShard("data")}
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        state = load({"model": model, "optimizer": optimizer, "step": 0}, tmp_path / "one")
        assert state["step"] == 1
        assert optimizer.param_groups[0]["lr"] == 0.1
        spread = distribute(x, mesh, ["data", None])
        assert [_step(model, optimizer, spread) for _ in range(2)] == pytest.approx(losses, rel=1e-5)
    # PyTorch's own reads it without any mesh.
    from torch.distributed.checkpoint import load as plain_load

    plain = {f"model.{name}": value for name, value in _model().state_dict().items()}
    with warnings.catch_warnings(action="ignore"):
        plain_load(plain, checkpoint_id=tmp_path / "one", no_dist=True)
    export_safetensors(tmp_path / "one", tmp_path / "model.safetensors", prefix="model.")
    assert _read_safetensors(tmp_path / "model.safetensors").keys() == _model().state_dict().keys()
    for name, value in _read_safetensors(tmp_path / "model.safetensors").items():
        assert torch.equal(value, plain[f"model.{name}"])


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        found = {}
        for name, each in header.items():
            begin, end = (8 + size + offset for offset in each["data_offsets"])
            found[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).view(
                each["shape"]
            )
        return found
    return dict(load_file(path))


def test_a_failed_load_is_an_error_and_changes_nothing(procs: ProcMesh, tmp_path: Path) -> None:
    x = share(torch.ones(3), procs)
    save({"weight": x, "step": 1}, tmp_path / "a").get(timeout=60)
    y = share(torch.zeros(3), procs)
    with pytest.raises(CheckpointError, match="no such directory"):
        load({"weight": y}, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"has no 'weigth'; it has 'weight'"):
        load({"weight": y, "weigth": y}, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"'weight' has the shape \(3,\) .* and \(4,\)"):
        load({"weight": share(torch.zeros(4), procs)}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="'step' is a tensor here"):
        load({"weight": y, "step": y}, tmp_path / "a")
    optimizer = torch.optim.AdamW([nn.Parameter(y.clone())])
    with pytest.raises(CheckpointError, match=r"has no 'optimizer\."):
        load({"weight": y, "optimizer": optimizer}, tmp_path / "a")
    assert not optimizer.state
    part = next((tmp_path / "a").glob("__1_*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"not whole: its file {part.name} has"):
        load({"weight": y}, tmp_path / "a")
    part.unlink()
    with pytest.raises(CheckpointError, match=f"not whole: its file {part.name} is missing"):
        load({"weight": y}, tmp_path / "a")
    (tmp_path / "a" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no file \.metadata"):
        load({"weight": y}, tmp_path / "a")
    assert fetch_shard(y).tolist() == [0.0] * 3


def test_a_poisoned_tensor_is_not_saved_and_the_last_checkpoint_stays(
    procs: ProcMesh, tmp_path: Path
) -> None:
    x = share(torch.ones(3), procs)
    save({"x": x}, tmp_path / "a").get(timeout=60)
    bad = x[share(torch.tensor([7]), procs)]
    with pytest.raises(RemoteException, match="index 7") as caught:
        save({"x": bad}, tmp_path / "a").get(timeout=60)
    assert "while 'x' was to be saved" in caught.value.__notes__[0]
    assert _names(tmp_path) == ["a"]
    load({"x": x}, tmp_path / "a")
    assert fetch_shard(x).tolist() == [1.0] * 3


def _die_at(word: str, moment: int) -> None:
    """Have this process be killed when it opens or renames something of that name for the n-th time."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in ("open", "os.rename", "os.mkdir") and word in str(args[0]):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.full
def test_a_worker_that_dies_while_it_writes_leaves_the_last_checkpoint(
    tmp_path: Path, preload: list[str]
) -> None:
    """CKP-1, where a worker dies."""
    with this_host().spawn_procs({"gpus": 2}, preload=preload) as procs:
        with activate(procs):
            x = torch.full((1000,), 1.0)
        save({"x": x}, tmp_path / "a").get(timeout=60)
        with activate(procs):
            y = x * 2

        @remote(propagate=lambda t: None)
        def arm(t: Any) -> None:
            _die_at(".distcp", 1)

        arm(slice_mesh(y, gpus=1))
        with pytest.raises(DeviceMeshError, match="gpus=1"):
            save({"x": y}, tmp_path / "a").get(timeout=60)
        assert _names(tmp_path) == ["a"]
        procs.respawn().get(timeout=60)
        # What the dead had is back, and so is what others had.
        load({"x": x}, tmp_path / "a")
        assert [float(each[0]) for each in fetch(x).values()] == [1.0, 1.0]


_SCRIPT = """
import os, signal, sys
import torch
from mesh_core import this_host
from mesh_tensor import save, share

path, moment = sys.argv[1], int(sys.argv[2])
seen = 0

def hook(event, args):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and ".partial" in str(args[0]):
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    with this_host().spawn_procs({"gpus": 1}) as procs:
        x = share(torch.full((100,), 1.0), procs)
        save({"x": x, "step": 1}, path).get(timeout=100)
        sys.addaudithook(hook)
        x *= 2
        save({"x": x, "step": 2}, path).get(timeout=100)
"""


@pytest.mark.full
@pytest.mark.parametrize("moment", random.Random(20).sample(range(1, 8), 1))
def test_a_controller_that_dies_at_some_moment_leaves_a_whole_checkpoint(
    moment: int, procs: ProcMesh, tmp_path: Path
) -> None:
    """CKP-1."""
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    ended = subprocess.run([sys.executable, script, tmp_path / "a", str(moment)], timeout=200, check=False)
    assert ended.returncode == -signal.SIGKILL
    x = share(torch.zeros(100), procs)
    found = load({"x": x, "step": 0}, tmp_path / "a", ranks=[0, 0])
    assert fetch_shard(x, gpus=1).tolist() == [float(found["step"])] * 100
    # Whoever saves there next removes what was left.
    save({"x": x}, tmp_path / "a").get(timeout=100)
    assert _names(tmp_path) == ["a", "train.py"]
