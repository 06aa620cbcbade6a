"""When what was done on a mesh."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mesh_core import Actor, DeviceMeshError, ProcMesh, endpoint, this_host

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    Mesh,
    RemoteException,
    activate,
    capture,
    distribute,
    fetch,
    rank_tensor,
    reduce,
    remote,
    share,
    slice_mesh,
    timeline,
    to_mesh,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def test_what_the_script_and_each_process_have_done_is_there_with_its_lines(procs: ProcMesh) -> None:
    x = share(torch.ones(4, 4), procs)
    with timeline(procs) as recorded:
        y = x @ x
        fetch(reduce(y, "gpus"), timeout=60)
    assert [point["gpus"] for point, _ in recorded.processes] == [0, 1]
    for _, spans in recorded.processes:
        done = [(span.name, span.kind) for span in spans if span.queued is not None]
        assert done == [("aten.mm.default", "compute"), ("mesh_tensor.reduce", "collective")]
        product = next(span for span in spans if span.queued is not None)
        assert product.line is not None
        assert product.line.endswith("y = x @ x")
        assert recorded.begun <= product.begun <= product.ended <= recorded.ended
        assert product.queued is not None
        assert product.queued >= 0
    assert {span.kind for span in recorded.script} == {"issue", "wait"}
    waited = next(span for span in recorded.script if span.kind == "wait")
    assert waited.line is not None
    assert "fetch(reduce(y" in waited.line


def test_collectives_within_operators_of_the_global_view_are_seen(procs: ProcMesh) -> None:
    with Mesh((2,), ("data",), procs) as mesh:
        x = distribute(torch.arange(8.0).view(4, 2), mesh, ["data", None])
        with timeline(mesh) as recorded:
            y = x.redistribute([None, None]).sum()
        assert y.item() == 28.0
    for _, spans in recorded.processes:
        assert any(span.kind == "collective" and "gather" in span.name for span in spans)
        assert any(span.name == "aten.sum.default" and span.kind == "compute" for span in spans)


def test_it_is_printed_as_a_summary_and_saved_as_a_trace(procs: ProcMesh, tmp_path: Path) -> None:
    x = share(torch.ones(2), procs)
    with timeline(procs) as recorded:
        for _ in range(3):
            x = x + 1
    lines = str(recorded).splitlines()
    assert "the script has waited" in lines[0]
    assert lines[1].split()[:3] == ["process", "compute", "ms"]
    assert [line.split()[0] for line in lines[2:4]] == ["gpus=0", "gpus=1"]
    assert lines[-1].split()[0] == "aten.add.Tensor"
    assert lines[-1].endswith("6 times")
    (full := tmp_path / "full.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{full}'"):
        recorded.save(full)
    recorded.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {0: "script", 1: "gpus=0", 2: "gpus=1"}
    added = [each for each in events if each["name"] == "aten.add.Tensor"]
    assert sorted(each["pid"] for each in added) == [1, 1, 1, 2, 2, 2]
    assert all(each["ph"] == "X" and each["dur"] >= 0 and each["ts"] >= 0 for each in added)
    assert all(each["args"]["line"].endswith("x = x + 1") for each in added)


def test_afterwards_nothing_is_recorded_and_another_one_begins_anew(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs)
    with timeline(procs) as first:
        x = x + 1
    before = len(first.processes[0][1])
    x = x * 2
    with timeline(procs) as second:
        x = x - 1
        with pytest.raises(RuntimeError, match="one timeline of a mesh at a time"), timeline(procs):
            pass
    assert [span.name for span in second.processes[0][1] if span.queued is not None] == ["aten.sub.Tensor"]
    assert len(first.processes[0][1]) == before
    assert fetch(x).values()[0].tolist() == [3.0, 3.0]


@remote(propagate=lambda x: x)
def failing(x: Any) -> Any:
    raise ValueError("no")


def test_an_error_while_recording_is_raised_as_usual(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs)
    with pytest.raises(RemoteException, match="failing failed at"), timeline(procs) as recorded:
        fetch(failing(x))
    assert [span.name for span in recorded.processes[0][1] if span.queued is not None] == ["failing"]
    with timeline(procs):
        pass


@remote(propagate=lambda x: x)
def dying(x: Any) -> Any:
    if x.item() == 1:
        os._exit(1)
    return x


@pytest.mark.full
def test_a_process_that_dies_meanwhile_is_reported_and_replaced(preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 2}, preload=preload) as procs:
        rank = rank_tensor(procs, "gpus")
        with pytest.raises(DeviceMeshError), timeline(procs):
            fetch(dying(rank), timeout=60)
        procs.respawn().get(timeout=60)
        with timeline(procs) as recorded, activate(procs):
            torch.ones(1)
        found = [[span.name for span in spans if span.queued is not None] for _, spans in recorded.processes]
        assert found == [["aten.ones.default"]] * 2


def test_a_captured_step_is_one_span(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs)

    @capture
    def step(x: Any) -> Any:
        return x + 1 + 1

    step(x)
    assert step.replays == 0
    with timeline(procs) as recorded:
        for _ in range(3):
            x = step(x)
    assert step.replays == 3
    for _, spans in recorded.processes:
        done = [(span.name, span.kind) for span in spans if span.queued is not None]
        assert done == [("replay", "compute")] * 3
        assert all(
            span.line is not None and "x = step(x)" in span.line for span in spans if span.name == "replay"
        )


class Taker(Actor):
    """Takes a tensor."""

    @endpoint
    def take(self, tensor: Any) -> float:
        return float(tensor.sum())


def test_moves_between_meshes_and_to_actors_are_spans_with_their_lines(procs: ProcMesh) -> None:
    first, second = procs.slice(gpus=0), procs.slice(gpus=1)
    x = share(torch.ones(4), first)
    taker = first.spawn("taker", Taker)
    with timeline(first) as sending, timeline(second) as receiving:
        y = to_mesh(x, second)
        assert taker.take.call_one(x).get(timeout=60) == 4.0
        assert fetch(y, timeout=60).item().tolist() == [1.0] * 4
    for recorded, names in (
        (sending, ["to_mesh: send", "copy for an actor"]),
        (receiving, ["to_mesh: receive"]),
    ):
        ((_, spans),) = recorded.processes
        moves = [span for span in spans if span.kind == "move"]
        assert [span.name for span in moves] == names
        assert moves[0].line is not None
        assert moves[0].line.endswith("y = to_mesh(x, second)")
        assert moves[0].queued is not None
        assert moves[0].queued >= 0
        assert any(span.kind == "issue" and span.line == moves[0].line for span in recorded.script)
        assert "move ms" in str(recorded)
    taker.stop().get(timeout=60)


def test_what_is_done_on_slices_has_its_own_lines(procs: ProcMesh, tmp_path: Path) -> None:
    with timeline(procs) as recorded:
        x = rank_tensor(procs, "gpus").float().view(1)
        for _ in range(3):
            x = x + 1
        first = slice_mesh(x, gpus=0)
        moved = to_mesh(first, procs.slice(gpus=1))
        total = reduce(moved)
        assert fetch(total, timeout=60).item().tolist() == [3.0]
    found = {}
    for point, spans in recorded.processes:
        for span in spans:
            if span.queued is not None:
                found[point["gpus"], span.name] = span.line or ""
    assert found[0, "to_mesh: send"].endswith("moved = to_mesh(first, procs.slice(gpus=1))")
    assert found[1, "to_mesh: receive"].endswith("moved = to_mesh(first, procs.slice(gpus=1))")
    assert found[1, "mesh_tensor.reduce"].endswith("total = reduce(moved)")
    assert found[1, "aten.add.Tensor"].endswith("x = x + 1")
    recorded.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {
        each["args"]["line"].rpartition(": ")[2] for each in events if each["name"] == "mesh_tensor.reduce"
    } == {"total = reduce(moved)"}
    with (
        timeline(procs),
        pytest.raises(RuntimeError, match="one timeline of a mesh at a time"),
        timeline(procs.slice(gpus=1)),
    ):
        pass
    # Nothing is recorded any longer.
    x = slice_mesh(x, gpus=0) + 1
    with timeline(procs.slice(gpus=0)) as later:
        x = x * 2
    assert [span.name for span in later.processes[0][1] if span.queued is not None] == ["aten.mul.Tensor"]
