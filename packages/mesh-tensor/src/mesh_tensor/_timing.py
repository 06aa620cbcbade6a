"""A process's part of a timeline: when each instruction began here, and ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mesh_tensor._instructions import RECEIVED, SENT, SPECIAL
from mesh_tensor._operators import COLLECTIVE_SPACES

if TYPE_CHECKING:
    from mesh_tensor._bench import Bench

MOST = 1_000_000
"""The most spans that are kept; later ones are only counted."""
COMPUTE, COLLECTIVE, OTHER, MOVE = range(4)
_COLLECTIVES = {
    f"{SPECIAL}.{each}" for each in ("reduce", "reduce_all", "reduce_scatter", "all_gather", "all_to_all")
}
_LENT = {"lend": "copy for an actor", "unlend": "free a copy for an actor"}
_MOVES = {SENT, RECEIVED, *(f"{SPECIAL}.{each}" for each in ("collect", "collected"))}
"""Instructions that send tensors, or wait for them."""


class _Meetings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the collectives within operators on DTensors."""

    def __init__(self, timing: Timing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timing = timing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # It is carried out with this mode still active.
            return NotImplemented
        if func.namespace not in COLLECTIVE_SPACES:
            return func(*args, **(kwargs or {}))
        begun = time.time_ns()
        result = func(*args, **(kwargs or {}))
        self.timing.add(-1, func.name().partition("::")[2], COLLECTIVE, begun)
        return result


class Timing:
    """What a process records for one controller."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.spans: list[tuple[int, str, int, int, int]] = []
        """Number of the instruction, name, kind, beginning and end in nanoseconds since 1970."""
        self.left_out = 0
        self._meetings = _Meetings(self)

    def add(self, instruction: int, name: str, kind: int, begun: int) -> None:
        """Record an interval that began then and ends now."""
        if len(self.spans) < MOST:
            self.spans.append((instruction, name, kind, begun, time.time_ns()))
        else:
            self.left_out += 1

    def do(self, kind: str, rest: list[Any]) -> Any:
        """Carry out what the controller wants, and record it."""
        if kind == "run":
            with self._meetings:
                return self._run(*rest)
        begun = time.time_ns()
        result = getattr(self.bench, kind)(*rest)
        if kind == "timed":
            return result
        if kind == "replay":
            # A captured step, as a whole.
            self.add(rest[2], kind, COMPUTE, begun)
            return result
        if kind == "exchange":
            what, count, *_ = rest
            self.add(count, _LENT[what], MOVE, begun)
            return result
        self.add(-1, kind if kind != "within" else rest[1], OTHER, begun)
        return result

    def _run(self, first: int, code: Any, scalars: list[Any], freed: list[int]) -> None:
        numbers = iter(scalars)
        at, count = 0, first
        while at < len(code):
            if code[at] < 0:
                # Tensors that are freed.
                end = at + 1 - code[at]
                self.bench.run(count, code[at:end], [], [])
                at = end
                continue
            template = self.bench.templates[code[at]]
            end = at + 2 + template.refs
            begun = time.time_ns()
            self.bench.run(count, code[at:end], numbers, [])
            name = template.name
            kind = COLLECTIVE if name in _COLLECTIVES else MOVE if name in _MOVES else COMPUTE
            self.add(count, template.name, kind, begun)
            at, count = end, count + 1
        self.bench.run(count, code[:0], [], freed)
