"""Failed items."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError, in_a_line

if TYPE_CHECKING:
    from mesh_core._blocks.pipeline.packed import Packed


@dataclass(frozen=True, slots=True, repr=False)
class Quarantined:
    """An item that a stage failed on; see :attr:`PipelineRun.quarantined`."""

    stage: str
    """The stage's name."""
    item: str
    """The stage's input, as a short ``repr``."""
    index: int
    """The index of the source's item that it was made of."""
    error: BaseException
    """What the stage raised."""
    attempts: int
    """How often it was started."""
    _kept: Packed | None

    def value(self) -> Any:
        """The stage's input; raises a :class:`LookupError` if it was too large to be kept."""
        if self._kept is None:
            raise LookupError(
                f"{self.item} was not kept: quarantined items keep max_bytes at most. It was made of item {self.index} of the source"
            )
        return self._kept.load()

    def __repr__(self) -> str:
        return f"<Quarantined {self.item} in {self.stage}: {in_a_line(self.error)}>"


class StageError(MeshError):
    """An item failed, and ended the run of a pipeline. ``stage``, ``item`` (a short ``repr``), ``index`` (of the source's item
    that it was made of) and ``attempts`` identify it; what the stage raised is the ``__cause__``.
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
            f"{bad.stage} failed on {bad.item}{attempts} (item {bad.index} of the source): {in_a_line(bad.error)}{more}"
        )
        error.stage, error.item, error.index, error.attempts = bad.stage, bad.item, bad.index, bad.attempts
        error.__cause__ = bad.error
        return error


def quarantined(
    stage: str, packed: Packed | None, index: int, error: BaseException, *, attempts: int, keep: bool
) -> Quarantined:
    """Describe an item that has failed."""
    item = "an item that cannot be pickled"
    if packed is not None:
        try:
            item = reprlib.repr(packed.load())
        except Exception as failed:  # noqa: BLE001 - the user's code; the item's own error matters more
            item = f"an item that cannot be unpickled here ({type(failed).__name__})"
    return Quarantined(stage, item, index, error, attempts, packed if keep else None)
