"""What a future stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mesh_core._native import Completion, Waker


class Coming(Protocol):
    """Something that an event loop can wait for."""

    def look(self, seen: int | None = None) -> bool:
        """Wait until it is done or has progressed, or until that would block; true in the first case."""

    def tell(self, waker: Waker, token: int, seen: int = ...) -> None:
        """Give an event loop ``token`` when it is done, or has progressed."""

    def is_local(self) -> bool:
        """Whether it is for an actor of this process."""

    @property
    def actor(self) -> int:
        """The actor that it is for; 0 for none."""


class Awaited(Coming, Protocol):
    """Something that is going to be done: a call, a promise, or several futures together.

    It may progress before it is done. Its waiters say how much of that they have ``seen``.
    """

    def done(self) -> bool:
        """Whether the outcome is there."""

    def wait(self, timeout: float | None = None, seen: int | None = None, heed: bool = True) -> bool:
        """Block until it is done, or has progressed; false if ``timeout`` came first."""

    def note(self, listener: Completion, token: int, seen: int = ...) -> None:
        """The same for a list of what is waited for together."""

    def forget(self, listener: Completion) -> None:
        """Undo :meth:`note`."""

    def cancel(self) -> bool:
        """Give it up; false if it is done."""

    def look_away(self) -> None:
        """Report no failure of it that nobody has looked at."""

    def asked_by(self, actor: int) -> None:
        """Say which actor is about to wait for it."""

    def missing(self) -> list[int]:
        """Who has not answered, of those that were asked."""
