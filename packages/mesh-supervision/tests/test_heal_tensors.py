"""What lives on processes is healed with them: a mesh of tensors, and anything else that has processes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from mesh_core import DeviceMeshError, MeshError, ProcMesh, this_host
from mesh_supervision import Ignore, heal_mesh

pytestmark = [pytest.mark.beside, pytest.mark.slow]


@dataclass(frozen=True)
class Caches:
    """Somebody's own class, of which mesh-supervision knows nothing."""

    procs: ProcMesh


def test_what_has_processes_is_healed_with_them() -> None:
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        procs.initialized.get(timeout=30)
        caches = Caches(procs)
        procs.slice(gpus=1).stop().get(timeout=30)
        assert heal_mesh(caches) is caches
        assert len(procs.alive()) == 2
        with pytest.raises(ValueError, match=r"cannot shrink: its processes have fixed places"):
            heal_mesh(caches, mode="shrink")


def test_what_has_no_processes_is_refused() -> None:
    with pytest.raises(TypeError, match=r"heal_mesh\(\) takes a mesh of actors or of processes, .* got 3"):
        heal_mesh(3)


def _add_forever(y: Any) -> None:
    while True:
        y = y + 1


def test_a_training_on_a_mesh_of_tensors_goes_on() -> None:
    torch = pytest.importorskip("torch")
    mesh_tensor = pytest.importorskip("mesh_tensor")
    batches = [torch.full((2,), float(step)) for step in range(5)]
    mesh = mesh_tensor.Mesh(shape=(2,), mesh_dim_names=("data_parallel",))
    lost, results = [], []
    try:
        for step, batch in enumerate(batches):
            if step == 2:
                os.kill(mesh.procs.pids[1], signal.SIGKILL)
            try:
                y = mesh.execute(lambda x: x * 2, batch)
            except DeviceMeshError as error:
                lost.append(error.coordinates)
                mesh = heal_mesh(mesh)
                y = mesh.execute(lambda x: x * 2, batch)
            results.append(mesh_tensor.fetch(y).tolist())
        assert lost == [({"data_parallel": 1},)]
        assert results == [[step * 2.0] * 2 for step in range(5)]
        os.kill(mesh.procs.pids[0], signal.SIGKILL)
        # Operators do not wait, and raise once the news of the death is here: then the script has been told, and may wait again.
        with pytest.raises(DeviceMeshError):
            _add_forever(y)
        mesh = heal_mesh(mesh)
        with pytest.raises(MeshError, match="the tensor is not there"):
            mesh_tensor.fetch(y)
        assert mesh_tensor.fetch(mesh_tensor.distribute(batches[1], mesh).sum()) == 2
    finally:
        mesh.stop()
