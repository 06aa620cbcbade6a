"""A tensor that one stream has lent to another, as the controller knows it."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import MeshError
from mesh_tensor._descriptors import HERE, strides_of
from mesh_tensor._errors import StreamError, line_of
from mesh_tensor._stream import INNER
from mesh_tensor._streams._guard import Storage, name_of, named, storage_of

if TYPE_CHECKING:
    from types import FrameType

    from mesh_tensor._propagate import Issuer
    from mesh_tensor._stream import Ref, Stream
    from mesh_tensor._tensor import MeshTensor


Place = tuple[Any, int]
"""A line of code: its function's, and which instruction."""


def user_frame() -> FrameType:
    """Return the frame of the nearest code that is neither PyTorch's nor this package's."""
    frame = sys._getframe(1)  # noqa: SLF001 - as the operators do
    while frame.f_code.co_filename.startswith(INNER) and frame.f_back is not None:
        frame = frame.f_back
    return frame


class Loan:
    """A tensor's memory at another stream. Until the loan has ended the tensor is kept, even if all others drop it."""

    def __init__(
        self, tensor: Any, borrower: Stream, borrowed: Ref, *, mutable: bool, frame: FrameType
    ) -> None:
        self.owner: Stream = tensor.descriptor.stream
        self.borrower = borrower
        self.mutable = mutable
        self._ended: str | Place | None = None
        """Its state in words, or the line that has dropped it."""
        self._place: Place = frame.f_code, frame.f_lasti
        self._ref: Ref | None = tensor.ref
        self._number = borrowed.number
        self.at_owner = storage_of(tensor.ref)
        self.at_borrower = Storage(self)
        self.at_owner.loans.append(self)

    @property
    def line(self) -> str:
        """The line that has borrowed it."""
        return line_of(self._place)

    @property
    def ended(self) -> str | None:
        """Its state, in words."""
        return f"was dropped at {line_of(self._ended)}" if isinstance(self._ended, tuple) else self._ended

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ended is not None

    def end(self, how: str | None = None) -> None:
        """Give the memory back: what the owner does next with it waits for the borrower's work. `how` is the reason, if it was not dropped."""
        owner, borrower = self.owner, self.borrower
        with owner.lock:
            if self._ended is not None:
                return
            if self.at_borrower.loans:
                (further, *_) = self.at_borrower.loans
                raise StreamError(
                    f"the borrow of {self.line} cannot be dropped, as {name_of(borrower.tensors)} has lent the tensor on to "
                    f"{name_of(further.borrower.tensors)}, since {further.line}: drop() that borrow first"
                )
            assert self._ref is not None, "until it ends"
            frame, number = user_frame(), next(owner.tensors.numbers)
            borrower.hand_over(owner, frame, "give_back", number, self._number, id(borrower))
            owner.hand_over(
                borrower, frame, "have_back", number, self._ref.number, id(borrower), self.mutable
            )
            self.at_owner.loans.remove(self)
            self._ended = how or (frame.f_code, frame.f_lasti)
            self._ref = None
            # Problems are raised to the next user of the mesh.
            with suppress(MeshError):
                borrower.send_soon()


def lend(tensor: MeshTensor, issuer: Issuer, *, mutable: bool, frame: FrameType) -> tuple[Any, Loan]:
    """Let a stream borrow a tensor; return the tensor to use there. To be called without modes."""
    owner, borrower = tensor.descriptor.stream, issuer.stream
    guard = borrower.tensors.guard
    owner.tensors.recorded(lambda recorder: recorder.exchanges("borrow a tensor"))
    with owner.lock:
        guard.settle()
        guard.check_value("borrow", tensor)
        _check_exclusive(tensor, mutable)
        ref = _handed(tensor.ref, owner, borrower, copied=False, frame=frame)
        if (device := tensor.descriptor.form[4].type) not in HERE:
            issuer.use_device(device)
        loan = Loan(tensor, borrower, ref, mutable=mutable, frame=frame)
        ref.storage = loan.at_borrower
        return issuer.named(borrower.descriptor(tensor.descriptor.form), ref), loan


def _check_exclusive(tensor: MeshTensor, mutable: bool) -> None:
    storage = storage_of(tensor.ref)
    if mutable and storage.loan is not None and not storage.loan.mutable:
        raise StreamError(
            f"{named(tensor)}, was borrowed at {storage.loan.line} to be read only, and cannot be lent on to be changed"
        )
    if mutable and storage.loans:
        other = storage.loans[0]
        raise StreamError(
            f"{named(tensor)}, cannot be lent to be changed while it is lent to {name_of(other.borrower.tensors)}, since {other.line}: "
            "drop() that borrow first"
        )


def _handed(source: Ref, owner: Stream, borrower: Stream, *, copied: bool, frame: FrameType) -> Ref:
    """Move a tensor from a stream to another one, in the order of both; return its name there."""
    owner.check()
    borrower.check()
    lives = owner.lives, borrower.lives
    number = next(owner.tensors.numbers)
    ref = borrower.ref()
    ref.at = frame.f_code, frame.f_lasti
    owner.tensors.guard.lenders[id(owner)] = owner
    owner.tensors.guard.lenders[id(borrower)] = borrower
    owner.hand_over(borrower, frame, "give", number, source.number, id(owner), copied)
    borrower.hand_over(owner, frame, "take", number, ref.number, id(owner))
    borrower.send_soon()
    if owner.broken or borrower.broken or lives != (owner.lives, borrower.lives):
        # A process may have been restarted after the first message and before the second: it must not wait.
        owner.alone(frame, "pass_by", next(owner.tensors.numbers), id(owner))
    return ref


class Lent(torch.autograd.Function):
    """A loan through which gradients flow back, as copies."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, issuer: Issuer, told: list[Loan], frame: FrameType) -> Any:
        """Lend it."""
        ctx.owner = tensor.descriptor.stream
        result, loan = lend(tensor, issuer, mutable=False, frame=frame)
        told.append(loan)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Hand the gradient to the stream that the tensor belongs to."""
        (grad,) = grads
        return given_over(grad, ctx.owner), None, None, None


def given_over(tensor: Any, to: Stream) -> Any:
    """Return a copy of a tensor that belongs to another stream."""
    source = tensor.descriptor.stream
    with to.lock, _disable_current_modes():
        frame = user_frame()
        ref = _handed(tensor.ref, source, to, copied=True, frame=frame)
        shape, _, _, dtype, device = tensor.descriptor.form
        return to.issuer.named(to.descriptor((shape, strides_of(shape), 0, dtype, device)), ref)
