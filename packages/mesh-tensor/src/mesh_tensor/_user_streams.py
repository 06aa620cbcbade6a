"""`Stream`: what a script knows of streams."""

from __future__ import annotations

import itertools
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core.extensions import find, install
from mesh_tensor._errors import StreamError
from mesh_tensor._extension import Tensors
from mesh_tensor._lanes import Lane, lane_class
from mesh_tensor._streams._guard import name_of, named
from mesh_tensor._streams._loans import Lent, lend, user_frame
from mesh_tensor._values import of_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from mesh_tensor._streams._loans import Loan
    from mesh_tensor._tensor import MeshTensor

_numbers = itertools.count(1)


class Stream:
    """A separate queue of work in each process of a mesh, beside the default one. Work on different streams runs concurrently.

    Operators issued inside `with stream.activate():` run on the stream, in the order in which they are issued, and the tensors that
    they create belong to it. Use a tensor of another stream by borrowing it. A stream is a thread in each process and, on CUDA
    devices, a CUDA stream as well. Create few and keep them: a stream lasts as long as the script.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import Stream, activate, fetch, reduce
    >>> comm = Stream("comm")
    >>> with this_host().spawn_procs({"gpus": 2}) as procs, activate(procs):
    ...     x = torch.ones(3)
    ...     borrowed, borrow = comm.borrow(x)
    ...     with borrow, comm.activate():
    ...         total = reduce(borrowed)  # while the default stream goes on
    ...     y = x * 3
    ...     print(fetch(total).item(gpus=0), fetch(y).item(gpus=0))
    tensor([2., 2., 2.]) tensor([3., 3., 3.])
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a stream must be a text, got {name!r}")
        self._name = name
        self._number = next(_numbers)

    @property
    def name(self) -> str:
        """The name given to it."""
        return self._name

    def __repr__(self) -> str:
        return f"Stream({self._name!r})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled: it is a queue of the script that has made it")

    @contextmanager
    def activate(self) -> Iterator[Self]:
        """Run the operators that this thread issues in the block on this stream."""
        guard, lane = self._guard(), self._lane()
        before, guard.active = guard.active, lane if isinstance(lane, Lane) else None
        try:
            yield self
        finally:
            guard.active = before

    def borrow(self, tensor: torch.Tensor, *, mutable: bool = False) -> tuple[MeshTensor, Borrow]:
        """Borrow a tensor of another stream; returns the tensor to use on this stream, and the loan.

        This stream waits until the owner has reached this point. Until the loan is dropped, the owner cannot change the tensor. With
        `mutable=True` the owner cannot use it at all, and this stream may change it. Several streams can borrow a tensor for reading. Gradients
        flow back through it, as copies.

        >>> import torch
        >>> from mesh_core import this_host
        >>> from mesh_tensor import Stream, activate, fetch
        >>> side = Stream("side")
        >>> with this_host().spawn_procs({"gpus": 1}) as procs, activate(procs):
        ...     x = torch.zeros(2)
        ...     borrowed, borrow = side.borrow(x, mutable=True)
        ...     with side.activate():
        ...         _ = borrowed.add_(1)
        ...     borrow.drop()
        ...     print(fetch(x + 1).item(gpus=0))
        tensor([2., 2.])
        """
        tensor = of_mesh(tensor)
        source, lane = tensor.descriptor.stream, self._lane()
        if source.tensors is lane:
            raise StreamError(
                f"{named(tensor)}, belongs to {name_of(lane)} already: it can be used there without a borrow"
            )
        frame = user_frame()
        with _disable_current_modes():
            issuer = lane.issuer(source.procs, source.issuer.cls)
            if tensor.requires_grad and torch.is_grad_enabled():
                told: list[Loan] = []
                if mutable:
                    raise StreamError(
                        f"{named(tensor)}, requires gradients, which do not flow through changes of another stream: detach() it, or borrow it "
                        "within torch.no_grad()"
                    )
                result: Any = Lent.apply(tensor, issuer, told, frame)
                (loan,) = told
            else:
                result, loan = lend(tensor, issuer, mutable=mutable, frame=frame)
        return result, Borrow(loan)

    def _tensors(self) -> Tensors:
        return find(Tensors) or install(Tensors)

    def _guard(self) -> Any:
        guard = self._tensors().guard
        guard.on = True
        return guard

    def _lane(self) -> Tensors:
        guard = self._guard()
        cls = lane_class(self._number)
        lane = find(cls)
        if lane is None:
            lane = install(cls)
        if lane.stream is None:
            lane.stream = self
            guard.lanes.append(lane)
        return lane


class _Default(Stream):
    """The stream on which everything runs for which no other stream is active."""

    def __init__(self) -> None:
        super().__init__("default")

    def __repr__(self) -> str:
        return "default_stream()"

    def _lane(self) -> Tensors:
        self._guard()
        return self._tensors()


_default = _Default()


def default_stream() -> Stream:
    """Return the stream that is used when no other stream is active.

    >>> from mesh_tensor import Stream, current_stream, default_stream
    >>> with Stream("comm").activate():
    ...     print(current_stream(), current_stream() is default_stream())
    Stream('comm') False
    """
    return _default


def current_stream() -> Stream:
    """Return the stream that is active in this thread."""
    tensors = find(Tensors)
    return _default if tensors is None else stream_of(tensors.guard.active)


def stream_of(lane: Tensors | None) -> Stream:
    """Return the script's `Stream` for an internal one."""
    return getattr(lane, "stream", None) or _default


class Borrow:
    """The loan of a tensor to a stream. End it with `drop()`, or use it in a `with` statement."""

    def __init__(self, loan: Loan) -> None:
        self._loan = loan

    @property
    def mutable(self) -> bool:
        """Whether the borrower may change the tensor."""
        return self._loan.mutable

    @property
    def dropped(self) -> bool:
        """Whether the loan has ended."""
        return self._loan.is_over

    def drop(self) -> None:
        """Return the tensor: later operators of the owner wait until the borrower has finished everything issued on it.

        The borrowed tensor and its views can no longer be used. Dropping twice does nothing.
        """
        self._loan.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def __repr__(self) -> str:
        loan = self._loan
        state = "dropped" if loan.is_over else "mutable" if loan.mutable else "read only"
        return f"<Borrow by {name_of(loan.borrower.tensors)}, {state}, of {loan.line}>"

    def __del__(self) -> None:
        loan = getattr(self, "_loan", None)
        if loan is None or loan.is_over or sys.is_finalizing():
            return
        # Garbage is collected at any place, and nothing may be sent from there: the next use of a tensor ends it.
        loan.owner.tensors.guard.forgotten.append(loan)
        warnings.warn(
            f"a tensor that was borrowed at {loan.line} was never given back: drop() the borrow, or use it with `with`. It ends now.",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )
