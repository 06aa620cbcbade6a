"""Saving: the controller plans, each process writes its part."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import MeshError, Promise
from mesh_core.extensions import find, install, watched
from mesh_tensor._checkpoint._place import Place, writing
from mesh_tensor._checkpoint._state import flat, opened
from mesh_tensor._checkpoint._worker import Files
from mesh_tensor._descriptors import Descriptor

if TYPE_CHECKING:
    from mesh_core import Future, ValueMesh
    from mesh_tensor._stream import Stream

ABOUT = "mesh_tensor.json"


@dataclass
class _Part:
    """One mesh's part of a state."""

    stream: Stream
    tensors: list[tuple[str, int]]
    number: int = 0
    asked: Future[ValueMesh[Any]] | None = None


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> Future[Path]:
    """Save a state as it is now; returns at once with a future of the path.

    `state` is a dict, nested to any depth, of tensors of either view, modules, optimizers and plain values. Each process copies its
    tensors at this point, continues, and writes them in the background. All hosts must see the directory.
    A previous checkpoint at the path remains until the new one is complete.

    >>> import tempfile
    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import fetch_shard, load, rank_tensor, save
    >>> with tempfile.TemporaryDirectory() as folder, this_host().spawn_procs({"gpus": 2}) as procs:
    ...     x = rank_tensor(procs, "gpus") * 10
    ...     done = save({"x": x, "step": 7}, f"{folder}/last")
    ...     x += 1
    ...     _ = done.get(timeout=60)
    ...     found = load({"x": x, "step": 0}, f"{folder}/last")
    ...     print(fetch_shard(x, gpus=1), found["step"])
    tensor(10) 7
    """
    target = Path(path).absolute()
    parts: dict[Stream, _Part] = {}
    mine: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    apart: dict[str, dict[str, int]] = {}
    with _disable_current_modes():
        for name, (way, value) in flat(opened(state)).items():
            paths[name] = tuple(key if isinstance(key, int) else str(key) for key in way)
            if isinstance(getattr(value, "descriptor", None), Descriptor):
                stream = value.descriptor.stream
                stream.tensors.guard.check_value("save", value)
                parts.setdefault(stream, _Part(stream, [])).tensors.append((name, value.ref.number))
                if not getattr(value, "is_global", False):
                    apart[name] = stream.procs.sizes
            else:
                mine[name] = (
                    value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                )
        files = find(Files) or install(Files)
        for part in parts.values():
            part.stream.check()
            files.install_on(part.stream.procs).get()
            part.number = next(part.stream.tensors.numbers)
        place = Place(target)
        try:
            ranks = {part.stream: part.stream.groups.ranks() for part in parts.values()}
            # All streams have one lock: nothing is issued on any of them in between.
            with next(iter(parts)).lock if parts else nullcontext():
                for part in parts.values():
                    part.asked = part.stream.ask(
                        "checkpoint", "snapshot", part.number, ranks[part.stream], part.tensors
                    )
        except BaseException:
            for part in parts.values():
                forget(part.stream, part.number)
            place.give_up()
            raise
    saving = _Saving(files, place, list(parts.values()), mine=mine, paths=paths, apart=apart)
    threading.Thread(target=saving.run, name="mesh-tensor-save", daemon=True).start()
    return watched(saving.promise.future, saving.so_far)


def forget(stream: Stream, number: int) -> None:
    """Let the processes drop what they keep, when they get to it."""
    with suppress(MeshError), stream.lock:
        stream.flush()
        stream.tensors.tell(stream.procs, ("checkpoint", "discard", number))


class _Saving:
    """One checkpoint that is being written."""

    def __init__(
        self,
        files: Files,
        place: Place,
        parts: list[_Part],
        *,
        mine: dict[str, Any],
        paths: dict[str, Any],
        apart: dict[str, dict[str, int]],
    ) -> None:
        self.promise: Promise[Path] = Promise()
        self._files = files
        self._before = files.last.get(place.path)
        files.last[place.path] = self.promise.future
        self._place = place
        self._parts = parts
        self._mine = mine
        self._paths = paths
        self._apart = apart
        self._doing = "waits until the tensors are there"

    def so_far(self) -> str:
        """Return how far it is."""
        return f"save {self._place.path.name}: {self._doing}"

    def run(self) -> None:
        """Write it."""
        try:
            self._write()
            if self._before is not None:
                # The later one of two stays, not the slower one.
                self._before.exception()
            self._place.finish()
        except BaseException as error:  # noqa: BLE001 - told to who waits
            self._place.give_up()
            self.promise.set_exception(error)
        else:
            self.promise.set_result(self._place.path)
        finally:
            if self._files.last.get(self._place.path) is self.promise.future:
                del self._files.last[self._place.path]

    def _write(self) -> None:
        path = str(self._place.partial)
        try:
            theirs = self._plans()
        except BaseException:
            for part in self._parts:
                forget(part.stream, part.number)
            raise
        # The controller's own values are the first part.
        planner = DefaultSavePlanner()
        planner.set_up_planner(self._mine, is_coordinator=True)
        own = replace(planner.create_local_plan(), planner_data=self._paths)
        plans, metadata = planner.create_global_plan([own, *theirs])
        writer = FileSystemWriter(path)
        writer.set_up_storage_writer(is_coordinator=True)
        plans = writer.prepare_global_plan(plans)
        waiting = []
        supply = iter(plans[1:])
        for part in self._parts:
            for _, proc in part.stream.procs:
                waiting.append(
                    (part, self._files.call(proc, (part.number, path, str(self._place.path), next(supply))))
                )
        self._doing = f"0 of {len(waiting)} processes have written"
        with writing(self._place.path):
            results = [writer.write_data(plans[0], planner).wait()] if plans[0].items else []
        for done, (part, future) in enumerate(waiting, 1):
            results += part.stream.wait(future).values()
            self._doing = f"{done} of {len(waiting)} processes have written"
        about = {"version": 1, "apart": self._apart}
        with writing(self._place.path):
            with (self._place.partial / ABOUT).open("w", encoding="utf-8") as file:
                json.dump(about, file)
                file.flush()
                os.fsync(file.fileno())
            writer.finish(metadata, results)

    def _plans(self) -> list[SavePlan]:
        plans: list[SavePlan] = []
        for part in self._parts:
            assert part.asked is not None, "the save has begun"
            for point, answer in part.stream.wait(part.asked):
                told = part.stream.value(point, answer)
                if isinstance(told, tuple):
                    name, failed = told
                    try:
                        part.stream.value(point, failed)
                    except Exception as error:
                        error.add_note(
                            f"while {name!r} was to be saved to {self._place.path}, where nothing has changed"
                        )
                        raise
                plans.append(told)
        return plans
