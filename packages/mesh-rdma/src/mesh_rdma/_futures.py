"""Futures of operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mesh_core import Future, Promise
from mesh_rdma._errors import RDMAError
from mesh_rdma._native import Operation

R = TypeVar("R")


def done(value: R) -> Future[R]:
    """Return a future that already has its result."""
    # Not Promise[R](): calling an alias takes longer than everything else here.
    promise: Promise[R] = Promise()
    promise.set_result(value)
    return promise.future


def of_operation(
    operation: Operation, what: str, take: Callable[[list[int | None]], R], keep: object = None
) -> Future[R]:
    """Return the future of an operation; ``take`` makes the result.

    Until it is done the future keeps ``keep``: the buffers, which may be this process's own.
    """
    if operation.done():
        promise: Promise[R] = Promise()
        try:
            promise.set_result(take(operation.result()))
        except RDMAError as error:
            promise.set_exception(error)
        return promise.future
    promise = Promise(what, finish=lambda _status: take(operation.result()))
    operation.finishes(promise.native_handle())

    kept = [keep]

    def given_up(_future: object) -> None:
        operation.cancel()
        # Not with the future: a raised error refers to it, and such garbage takes a while to be collected.
        kept.clear()

    # Also called if the future is cancelled, or a deadline of the message that is being handled has passed.
    promise.future.add_done_callback(given_up)
    return promise.future


def nothing(_found: list[int | None]) -> None:
    """Make the result of a copy."""


def first(found: list[int | None]) -> int:
    """Make the result of one atomic operation."""
    (value,) = found
    assert value is not None
    return value


def each(found: list[int | None]) -> list[int | None]:
    """Make the result of several operations."""
    return found
