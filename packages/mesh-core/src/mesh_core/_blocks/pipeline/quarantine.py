"""Items that have failed."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core._blocks.pipeline.packed import Packed


@dataclass(frozen=True, slots=True, repr=False)
class Quarantined:
    """An item that a stage has failed on; see :attr:`PipelineRun.quarantined`."""

    stage: str
    """The stage's name."""
    item: str
    """What it was given, as a short ``repr``."""
    index: int
    """The number in the source of what it was made of, from 0."""
    error: BaseException
    """What it has raised."""
    attempts: int
    """How often it was begun."""
    _kept: Packed | None

    def value(self) -> Any:
        """What the stage was given; a :class:`LookupError` where that was too large to be kept."""
        if self._kept is None:
            raise LookupError(
                f"{self.item} was not kept: quarantined items keep max_bytes at most. It was made of item {self.index} of the source"
            )
        return self._kept.load()

    def __repr__(self) -> str:
        return f"<Quarantined {self.item} in {self.stage}: {_said(self.error)}>"


class StageError(MeshError):
    """An item has failed, and with it the run of a pipeline: ``stage``, ``item`` (a short ``repr``), ``index`` (of what it was
    made of in the source) and ``attempts`` say which. What the stage has raised is the ``__cause__``.
    """

    stage: str
    item: str
    index: int
    attempts: int

    @classmethod
    def of(cls, bad: Quarantined, more: str = "") -> StageError:
        """The error of an item."""
        attempts = "" if bad.attempts < 2 else f" in {bad.attempts} attempts"
        error = cls(
            f"{bad.stage} failed on {bad.item}{attempts} (item {bad.index} of the source): {_said(bad.error)}{more}"
        )
        error.stage, error.item, error.index, error.attempts = bad.stage, bad.item, bad.index, bad.attempts
        error.__cause__ = bad.error
        return error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def quarantined(
    stage: str, packed: Packed | None, index: int, error: BaseException, *, attempts: int, keep: bool
) -> Quarantined:
    """Describe an item that has failed."""
    item = "an item that cannot be pickled"
    if packed is not None:
        try:
            item = reprlib.repr(packed.load())
        except Exception as failed:  # noqa: BLE001 - the user's own code; the item's own error matters more
            item = f"an item that cannot be unpickled here ({type(failed).__name__})"
    return Quarantined(stage, item, index, error, attempts, packed if keep else None)
