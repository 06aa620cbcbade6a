"""A tensor of the global view whose local part and layout are held apart: no DTensor is made of them until somebody needs one.

Imported in every process of a job, and therefore without PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_tensor._parts._layouts import Layout


class Apart:
    """This process's part of a tensor, and its layout."""

    __slots__ = ("layout", "local", "made")

    def __init__(self, local: Any, layout: Layout) -> None:
        self.local = local
        self.layout = layout
        self.made: Any = None
        """The DTensor, once there is one: from then on only that is right, for marks and later parts are put on it."""

    def joined(self) -> Any:
        """Return the DTensor, the same one each time."""
        if self.made is None:
            self.made = self.layout.join(self.local)
        return self.made


def joined(value: Any) -> Any:
    """Return what processes have under a number, as a DTensor if it is a tensor of the global view."""
    return value.joined() if type(value) is Apart else value
