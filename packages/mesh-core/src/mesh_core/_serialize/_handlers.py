"""What is reduced in a way of its own: memoryviews, numpy arrays, torch tensors, and what others have registered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mesh_core._serialize._arrays import reduce_array
from mesh_core._serialize._memory import reduce_memoryview
from mesh_core._serialize._registered import registry
from mesh_core._serialize._stream import OUT_OF_BAND_BYTES
from mesh_core._serialize._tensors import reduce_parameter, reduce_tensor

__all__ = ["OUT_OF_BAND_BYTES", "Reducer", "handlers"]

Reducer = Callable[[Any], Any]


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
    if registered := registry().reducers:
        found.update(registered)
    return found
