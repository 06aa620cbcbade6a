"""Convert plain data to bytes and back, for data from an untrusted process: reading never runs anything (BOX-1).

Plain data is ``None``, booleans, numbers, text, bytes, and lists, tuples, dictionaries and sets of these.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

_FLOAT = struct.Struct(">d")
_COMPLEX = struct.Struct(">dd")
_SIZE = struct.Struct(">Q")
_DEEPEST = 200
_CONTAINERS: dict[bytes, Callable[[Iterator[Any]], Any]] = {
    b"l": list,
    b"t": tuple,
    b"e": set,
    b"z": frozenset,
}
_CODES = {kind: code for code, kind in _CONTAINERS.items()}


class NotPlain(TypeError):
    """A value contains something that is not plain data."""


class Garbage(ValueError):
    """These bytes were not made by :func:`encode`."""


def encode(value: object, name: str = "result") -> bytes:
    """Turn plain data into bytes; ``name`` is what errors call it.

    >>> decode(encode({"a": [1, (2.5, None)], b"b": {True}}))
    {'a': [1, (2.5, None)], b'b': {True}}
    >>> encode([object()])
    Traceback (most recent call last):
    ...
    mesh_core._blocks.sandboxes.plain.NotPlain: result[0] is an object of type object
    """
    out = bytearray()
    _write(out, value, name, 0)
    return bytes(out)


def decode(data: bytes) -> Any:
    """Undo :func:`encode`; raise :class:`Garbage` for any other bytes."""
    reader = _Reader(memoryview(data))
    try:
        value = reader.value(0)
    except (UnicodeDecodeError, TypeError) as error:  # TypeError: an unhashable key
        raise Garbage(str(error)) from None
    if reader.at != len(data):
        raise Garbage(f"{len(data) - reader.at} bytes too many")
    return value


def _write(out: bytearray, value: Any, name: str, depth: int) -> None:  # noqa: C901 - one line for each kind
    kind = type(value)
    if depth > _DEEPEST:
        raise NotPlain(f"the value is nested more than {_DEEPEST} deep, or contains itself")
    if value is None:
        out += b"n"
    elif kind is bool:
        out += b"1" if value else b"0"
    elif kind is int:
        _sized(out, b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    elif kind is float:
        out += b"f" + _FLOAT.pack(value)
    elif kind is complex:
        out += b"c" + _COMPLEX.pack(value.real, value.imag)
    elif kind is str:
        _sized(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _sized(out, b"b", value)
    elif kind is bytearray:
        _sized(out, b"y", value)
    elif kind is dict:
        out += b"d" + _SIZE.pack(len(value))
        for key, each in value.items():
            _write(out, key, f"a key of {name}", depth + 1)
            _write(
                out, each, f"{name}[{key!r}]" if type(key) in (int, str) else f"a value of {name}", depth + 1
            )
    elif kind in _CODES:
        out += _CODES[kind] + _SIZE.pack(len(value))
        for index, each in enumerate(value):
            _write(
                out, each, f"{name}[{index}]" if kind in (list, tuple) else f"a member of {name}", depth + 1
            )
    else:
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise NotPlain(f"{name} is an object of type {module}{kind.__qualname__}")


def _sized(out: bytearray, code: bytes, data: bytes | bytearray) -> None:
    out += code
    out += _SIZE.pack(len(data))
    out += data


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self.at:
            raise Garbage("the data ends too soon")
        self.at += size
        return self._data[self.at - size : self.at]

    def _size(self) -> int:
        size: int = _SIZE.unpack(self._take(8))[0]
        # Each member takes at least one byte, so a size beyond the end of the data is invalid.
        if size > len(self._data) - self.at:
            raise Garbage("the data ends too soon")
        return size

    def value(self, depth: int) -> Any:  # noqa: PLR0911 - one line for each kind
        if depth > _DEEPEST:
            raise Garbage(f"nested more than {_DEEPEST} deep")
        code = bytes(self._take(1))
        if code == b"n":
            return None
        if code in (b"0", b"1"):
            return code == b"1"
        if code == b"f":
            return _FLOAT.unpack(self._take(8))[0]
        if code == b"c":
            return complex(*_COMPLEX.unpack(self._take(16)))
        if code not in b"isbyd" and code not in _CONTAINERS:
            raise Garbage(f"unknown code {code!r}")
        size = self._size()
        if code == b"i":
            return int.from_bytes(self._take(size), "big", signed=True)
        if code == b"s":
            return str(self._take(size), "utf-8", "surrogatepass")
        if code == b"b":
            return bytes(self._take(size))
        if code == b"y":
            return bytearray(self._take(size))
        if code == b"d":
            return {self.value(depth + 1): self.value(depth + 1) for _ in range(size)}
        return _CONTAINERS[code](self.value(depth + 1) for _ in range(size))
