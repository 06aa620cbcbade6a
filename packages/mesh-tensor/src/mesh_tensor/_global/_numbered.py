"""How a tensor is named in what is sent to workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numbered:
    """Stands for a tensor that workers have."""

    number: int
