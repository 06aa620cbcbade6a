"""What is reduced in a way of its own: memoryviews, numpy arrays, torch tensors, and what others have registered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from mesh_core._serialize.arrays import reduce_array
from mesh_core._serialize.memory import reduce_memoryview
from mesh_core._serialize.stream import OUT_OF_BAND_BYTES
from mesh_core._serialize.tensors import reduce_parameter, reduce_tensor

__all__ = ["OUT_OF_BAND_BYTES", "NoHandlerError", "Reducer", "Registered", "handlers", "registered"]

Reducer = Callable[[Any], Any]


class NoHandlerError(LookupError):
    """A message has an object whose handler is not registered here."""


class Registered:
    """What others have registered in this process; see ``registered``, which is imported by the first to do so."""

    __slots__ = ("handlers", "reducers")

    def __init__(self) -> None:
        # Replaced as a whole when something is registered, as messages are pickled meanwhile.
        self.reducers: dict[type, Reducer] = {}
        """By exact type."""
        self.handlers: dict[str, Any] = {}
        """What makes objects again, by the type's name."""


@cache
def registered() -> Registered:
    """The one of this process."""
    return Registered()


def handlers() -> dict[type, Reducer]:
    """Return a reducer for each exact type that has one.

    Asked anew for each message, since numpy and torch count only once somebody else has imported them; an
    import that another thread has not finished yet lacks the names looked for here.
    """
    found: dict[type, Reducer] = {memoryview: reduce_memoryview}
    modules = sys.modules
    numpy: Any = modules.get("numpy")
    if numpy is not None and (array := getattr(numpy, "ndarray", None)) is not None:
        found[array] = reduce_array
    torch: Any = modules.get("torch")
    if torch is not None and (tensor := getattr(torch, "Tensor", None)) is not None:
        found[tensor] = reduce_tensor
        if (parameter := getattr(getattr(torch, "nn", None), "Parameter", None)) is not None:
            found[parameter] = reduce_parameter
    if reducers := registered().reducers:
        found.update(reducers)
    return found
