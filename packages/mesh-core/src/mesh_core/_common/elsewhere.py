"""Attributes that other libraries have, and that objects of Mesh say where to find."""

from __future__ import annotations

from typing import NoReturn


class Elsewhere:
    """Stands for an attribute that is not there: whoever takes it learns what to use.

    A descriptor costs the other attributes of its class nothing, as ``__getattr__`` would.

    >>> class Box:
    ...     size = Elsewhere("use len(box)")
    >>> Box().size
    Traceback (most recent call last):
    ...
    AttributeError: 'Box' object has no attribute 'size': use len(box)
    """

    def __init__(self, hint: str) -> None:
        self._hint = hint
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}: {self._hint}",
            name=self._name,
            obj=instance,
        )
