"""What a future waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mesh_core._native import Completion, Waker


class Coming(Protocol):
    """Something that an event loop can wait for."""

    def look(self, seen: int | None = None) -> bool:
        """Poll briefly until it is done or has progressed; false if waiting longer would block."""

    def tell(self, waker: Waker, token: int, seen: int = ...) -> None:
        """Give ``token`` to an event loop when it is done or has progressed."""

    def is_local(self) -> bool:
        """Whether it is for an actor in this process."""

    @property
    def actor(self) -> int:
        """The actor that it is for; 0 if there is none."""


class Awaited(Coming, Protocol):
    """Something that will be done: a call, a promise, or several futures together.

    It may progress before it is done. Waiters pass how much progress they have ``seen``.
    """

    def done(self) -> bool:
        """Whether the outcome is available."""

    def wait(self, timeout: float | None = None, seen: int | None = None, heed: bool = True) -> bool:
        """Block until it is done or has progressed; false if ``timeout`` passed first."""

    def note(self, listener: Completion, token: int, seen: int = ...) -> None:
        """Put ``token`` into the list ``listener`` when it is done or has progressed."""

    def forget(self, listener: Completion) -> None:
        """Undo :meth:`note`."""

    def cancel(self) -> bool:
        """Give it up; false if it is done."""

    def is_behind(self) -> bool:
        """Whether processes that it is about have printed something that was not shown yet."""

    def look_away(self) -> None:
        """Do not report a failure of it that nobody has looked at."""

    def asked_by(self, actor: int) -> None:
        """Note which actor is about to wait for it."""

    def missing(self) -> list[int]:
        """The indices of those receivers that have not answered."""
