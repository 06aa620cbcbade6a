"""Which stream is active, and which tensors may be used on it: checked at the controller, before anything is sent.

OWN-1: an operator runs on one stream, the active one, and all its tensors belong to that stream: made on it, or borrowed by it. While a tensor is lent,
its owner does not change it; if it is lent to be changed, its owner does not use it at all. A view is lent with what it is a view of.

Nothing is checked before the script has used a stream.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref as weak

from mesh_tensor._errors import StreamError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh_tensor._extension import Tensors
    from mesh_tensor._stream import Ref, Stream
    from mesh_tensor._streams._loans import Loan


class Storage:
    """Memory that tensors share. A tensor has none of these until it has a view, or is lent."""

    __slots__ = ("loan", "loans", "views", "writes")

    def __init__(self, loan: Loan | None = None) -> None:
        self.loan = loan
        """The loan by which it was borrowed."""
        self.loans: list[Loan] = []
        """The loans by which it is lent."""
        self.writes = 0
        """How often operators have written to it, where that is counted: PyTorch does not count those on lists of tensors."""
        self.views: list[View] | None = None
        """If they are to be known: the tensors that were made of it, without its values."""


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor was made that shares memory with others."""

    ref: weak[Ref]
    template: int
    of: list[Any]
    """Tensors, or what names them."""
    scalars: list[Any]


def storage_of(ref: Ref) -> Storage:
    """Return a tensor's memory."""
    try:
        return ref.storage
    except AttributeError:
        ref.storage = made = Storage()
        return made


class Guard:
    """Checks the tensors of all streams of this process."""

    def __init__(self) -> None:
        self.on = False
        """The script has used a stream besides the default one."""
        self._here = threading.local()
        self.lenders: dict[int, Stream] = {}
        """By number, those that have handed something over: failures name them."""
        self.lanes: list[Tensors] = []
        """The streams besides the default one."""
        self.forgotten: deque[Loan] = deque()
        """Loans that nobody can end any longer."""

    @property
    def active(self) -> Tensors | None:
        """The stream that is active in this thread; ``None`` for the default one."""
        found: Tensors | None = getattr(self._here, "active", None)
        return found

    @active.setter
    def active(self, lane: Tensors | None) -> None:
        self._here.active = lane

    def check(self, what: Any, tensors: Sequence[Any], written: Iterable[int] = ()) -> None:
        """Raise if these tensors may not be used on the active stream, or those among them not written to."""
        if self.forgotten:
            self.settle()
        active = self.active
        for each in tensors:
            lane = each.descriptor.stream.tensors
            if lane is not active and (active is not None or lane.is_side) and not _is_free(what):
                raise self._elsewhere(what, each)
            storage = getattr(each.ref, "storage", None)
            if storage is not None and (storage.loans or storage.loan is not None):
                _check_loans(what, each, storage, writes=False)
        for at in written:
            storage = getattr(tensors[at].ref, "storage", None)
            if storage is not None and (storage.loans or storage.loan is not None):
                _check_loans(what, tensors[at], storage, writes=True)

    def check_value(self, what: Any, tensor: Any) -> None:
        """Raise if a tensor may not be read; reading runs on its own stream, whichever is active."""
        if self.forgotten:
            self.settle()
        storage = getattr(tensor.ref, "storage", None)
        if storage is not None:
            _check_loans(what, tensor, storage, writes=False)

    def check_replay(self, stream: Stream, captured: Iterable[Ref | None]) -> None:
        """Raise if a step of that stream may not be replayed, which may write to all tensors that it has captured."""
        lane, active = stream.tensors, self.active
        if lane is not active and (active is not None or lane.is_side):
            raise StreamError(
                f"the captured step was recorded on {name_of(lane)}, and {name_of(active)} is active: call it within "
                "`with stream.activate():`"
            )
        for ref in captured:
            storage = getattr(ref, "storage", None)
            if ref is None or storage is None:
                continue
            for loan in storage.loans:
                raise StreamError(
                    f"the captured step uses a tensor, made at {ref.stream.made_at(ref)}, that is lent to "
                    f"{name_of(loan.borrower.tensors)}, since {loan.line}: drop() the borrow first"
                )
            if storage.loan is not None and storage.loan.is_over:
                raise StreamError(
                    f"the captured step uses a tensor that was borrowed at {storage.loan.line}, and the borrow {storage.loan.ended}"
                )

    def settle(self) -> None:
        """End loans that were forgotten."""
        while self.forgotten:
            loan = self.forgotten.popleft()
            loan.end(f"was forgotten: nothing refers to the Borrow of {loan.line} any longer")

    def _elsewhere(self, what: Any, tensor: Any) -> StreamError:
        lane, active = tensor.descriptor.stream.tensors, self.active
        return StreamError(
            f"{what}: {named(tensor)}, belongs to {name_of(lane)}, and {name_of(active)} is active: borrow it with "
            f"`borrowed, borrow = {'default_stream()' if active is None else 'stream'}.borrow(tensor)`, or activate the stream that it belongs to"
        )


def _is_free(what: Any) -> bool:
    """Return whether an operator may run on another stream than the active one: that of its tensors."""
    import torch

    # Values are read there, and gradients computed where their tensors were.
    return (
        what is torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - what `item()` is
        or torch._C._current_graph_task_id() != -1  # noqa: SLF001 - nothing else tells
    )


def _check_loans(what: Any, tensor: Any, storage: Storage, *, writes: bool) -> None:
    loan = storage.loan
    if loan is not None and loan.is_over:
        raise StreamError(
            f"{what}: {named(tensor)}, was borrowed by {name_of(loan.borrower.tensors)} at {loan.line}, and the borrow {loan.ended}: "
            "borrow it again, or use it before"
        )
    if writes and loan is not None and not loan.mutable:
        raise StreamError(
            f"{what}: {named(tensor)}, was borrowed by {name_of(loan.borrower.tensors)} at {loan.line} to be read only: borrow it with "
            "mutable=True to change it"
        )
    for each in storage.loans:
        if each.mutable or writes:
            use = "used" if each.mutable else "changed"
            raise StreamError(
                f"{what}: {named(tensor)}, belongs to {name_of(each.owner.tensors)} and cannot be {use} while it is lent to "
                f"{name_of(each.borrower.tensors)}, since {each.line}: drop() the borrow first"
            )


def name_of(lane: Tensors | None) -> str:
    """Return a readable name of a stream."""
    stream = getattr(lane, "stream", None)
    return "the default stream" if stream is None else f"stream {stream.name!r}"


def named(tensor: Any) -> str:
    """Return a readable name of a tensor, with the line that has made it."""
    return f"{tensor!r}, made at {tensor.descriptor.stream.made_at(tensor.ref)}"
