"""How a tensor is named in messages to workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numbered:
    """Refers to a tensor that workers have."""

    number: int
