"""The part of a process when one stream lends a tensor to another.

A function here takes the bench of the stream that it runs on, the instruction's number for errors, and the controller's arguments.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from mesh_core import MeshError
from mesh_tensor import _devices
from mesh_tensor._instructions import GONE, LOST, Failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh_tensor._bench import Bench
    from mesh_tensor._devices import Mark

BETWEEN_STREAMS = frozenset({"give", "take", "give_back", "have_back", "pass_by"})
"""The functions that a controller may call."""


def give(  # noqa: PLR0917 - a message
    bench: Bench, count: int, number: int, ref: int, giver: int, copied: bool
) -> None:
    """Hand a tensor over to another stream, as it is at this place of this one."""
    value = bench.env.get(ref, LOST)
    marked: Sequence[Mark] = ()
    try:
        if type(value) is Failed:
            value = _told_elsewhere(value, giver)
        elif value is not LOST:
            # Its form may be changed in place there, which must not be visible here.
            value = value.detach()
            if copied:
                value = value.clone(memory_format=torch.contiguous_format)
        marked = _devices.marks()
    except Exception as error:  # noqa: BLE001 - whoever waits for it hears of it
        value = Failed((giver, count), "borrow", error)
    bench.handover.put((bench.controller, giver), number, (value, marked))


def take(bench: Bench, count: int, number: int, ref: int, giver: int) -> None:
    """Wait until another stream hands a tensor over, and store it."""
    value, marks = bench.handover.take((bench.controller, giver), number, (LOST, ()))
    _devices.wait(marks)
    if value is LOST:
        value = Failed(count, "borrow", MeshError(GONE))
    elif type(value) is not Failed and marks:
        _devices.used_here(value)
    bench.env[ref] = value


def give_back(bench: Bench, _: int, number: int, ref: int, giver: int) -> None:
    """Drop a borrowed tensor; its stream learns when the work of this one is done, and whether it has failed."""
    value = bench.env.pop(ref, LOST)
    failed = _told_elsewhere(value, giver) if type(value) is Failed else None
    bench.handover.put((bench.controller, giver), number, (failed, _devices.marks()))


def have_back(bench: Bench, count: int, number: int, ref: int, giver: int, mutable: bool) -> None:  # noqa: PLR0917 - a message
    """Wait until another stream is done with a tensor that it has borrowed."""
    failed, marks = bench.handover.take((bench.controller, giver), number, (LOST, ()))
    _devices.wait(marks)
    if mutable and failed is not None and ref in bench.env and type(bench.env[ref]) is not Failed:
        # The tensor that was to be written has neither its old nor its new values.
        bench.env[ref] = Failed(count, "borrow", MeshError(GONE)) if failed is LOST else failed


def pass_by(bench: Bench, _: int, number: int, giver: int) -> None:
    """Say that nothing with a smaller number will be handed over."""
    bench.handover.pass_by((bench.controller, giver), number)


def _told_elsewhere(failed: Failed, giver: int) -> Failed:
    """Return a failure as another stream has it: the number of its instruction counts on this one."""
    if isinstance(failed.instruction, tuple) and len(failed.instruction) == 2:
        return failed
    found = copy.copy(failed)
    found.instruction = (giver, failed.instruction)
    return found
