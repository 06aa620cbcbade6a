"""Convert plain data to bytes and back, for data from an untrusted process: reading never runs anything (BOX-1).

Plain data is ``None``, booleans, numbers, text, bytes, and lists, tuples, dictionaries and sets of these.

PLN-1: reading takes time and memory in proportion to the data, whatever bytes there are, and can be stopped at any moment: there is a limit on values,
on depth, and on keys of one container that have the same hash, between which hash tables compare each with each.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_FLOAT = struct.Struct(">d")
_COMPLEX = struct.Struct(">dd")
_SIZE = struct.Struct(">Q")
_DEEPEST = 200
MOST_VALUES = 1_000_000
"""How many values there may be, in all containers together."""
MOST_ALIKE = 64
"""How many members of a set, or keys of a dictionary, may have the same hash."""
_LOOK_EVERY = 1024
_SURROGATE = 3
"""Bytes of half a surrogate pair, which is as costly to read as a value."""
_CONTAINERS: dict[bytes, Callable[[list[Any]], Any]] = {
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
    writer = _Writer()
    writer.write(value, name, 0)
    return bytes(writer.out)


def decode(data: bytes, look: Callable[[], None] = lambda: None) -> Any:
    """Undo :func:`encode`; raise :class:`Garbage` for any other bytes. Calls ``look`` again and again, which may raise to stop."""
    reader = _Reader(memoryview(data), look)
    try:
        value = reader.value(0)
    except (UnicodeDecodeError, TypeError) as error:  # TypeError: an unhashable key
        raise Garbage(str(error)) from None
    if reader.at != len(data):
        raise Garbage(f"{len(data) - reader.at} bytes too many")
    return value


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self._left = MOST_VALUES

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise NotPlain(
                f"it has more than {MOST_VALUES:,} values; send many numbers as bytes, or in a file"
            )

    def write(self, value: Any, name: str, depth: int) -> None:  # noqa: C901, PLR0912 - one line for each kind
        out, kind = self.out, type(value)
        self._count(1)
        if depth > _DEEPEST:
            raise NotPlain(f"the value is nested more than {_DEEPEST} deep, or contains itself")
        if value is None:
            out += b"n"
        elif kind is bool:
            out += b"1" if value else b"0"
        elif kind is int:
            self._sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        elif kind is float:
            out += b"f" + _FLOAT.pack(value)
        elif kind is complex:
            out += b"c" + _COMPLEX.pack(value.real, value.imag)
        elif kind is str:
            self._text(value)
        elif kind is bytes:
            self._sized(b"b", value)
        elif kind is bytearray:
            self._sized(b"y", value)
        elif kind is dict:
            out += b"d" + _SIZE.pack(len(value))
            for key, each in value.items():
                self.write(key, f"a key of {name}", depth + 1)
                part = f"{name}[{key!r}]" if type(key) in (int, str) else f"a value of {name}"
                self.write(each, part, depth + 1)
            self._check_alike(value, name)
        elif kind in _CODES:
            out += _CODES[kind] + _SIZE.pack(len(value))
            for index, each in enumerate(value):
                part = f"{name}[{index}]" if kind in (list, tuple) else f"a member of {name}"
                self.write(each, part, depth + 1)
            if kind in (set, frozenset):
                self._check_alike(value, name)
        else:
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            raise NotPlain(f"{name} is an object of type {module}{kind.__qualname__}")

    def _text(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = text.encode("utf-8", "surrogatepass")
            self._count(len(data) // _SURROGATE)
        self._sized(b"s", data)

    def _sized(self, code: bytes, data: bytes | bytearray) -> None:
        self.out += code + _SIZE.pack(len(data))
        self.out += data

    def _check_alike(self, members: Iterable[Any], name: str) -> None:
        if (most := max(Counter(map(hash, members)).values(), default=0)) > MOST_ALIKE:
            raise NotPlain(
                f"{name} has {most} members or keys of the same hash, and {MOST_ALIKE} is the limit; return a list"
            )


class _Reader:
    def __init__(self, data: memoryview, look: Callable[[], None]) -> None:
        self._data = data
        self._look = look
        self._left = MOST_VALUES
        self.at = 0

    def _count(self, values: int) -> None:
        before, self._left = self._left, self._left - values
        if self._left < 0:
            raise Garbage(f"more than {MOST_VALUES:,} values")
        if before // _LOOK_EVERY != self._left // _LOOK_EVERY:
            self._look()

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
        self._count(1)
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
            return self._text(self._take(size))
        if code == b"b":
            return bytes(self._take(size))
        if code == b"y":
            return bytearray(self._take(size))
        if code == b"d":
            return self._dictionary([(self.value(depth + 1), self.value(depth + 1)) for _ in range(size)])
        members = [self.value(depth + 1) for _ in range(size)]
        return _CONTAINERS[code](self._set(members) if code in b"ez" else members)  # type: ignore[arg-type]

    def _text(self, data: memoryview) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            self._count(len(data) // _SURROGATE)
            return str(data, "utf-8", "surrogatepass")

    def _dictionary(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for some in self._unlike(pairs, lambda pair: hash(pair[0])):
            found.update(some)
        return found

    def _set(self, members: list[Any]) -> set[Any]:
        found: set[Any] = set()
        for some in self._unlike(members, hash):
            found.update(some)
        return found

    def _unlike(self, members: list[Any], hashed: Callable[[Any], int]) -> Iterator[list[Any]]:
        """Yield the members by and by; raise if too many have the same hash (PLN-1)."""
        hashes: Counter[int] = Counter()
        for at in range(0, len(members), _LOOK_EVERY):
            some = members[at : at + _LOOK_EVERY]
            new = [hashed(each) for each in some]
            hashes.update(new)
            if max(hashes[each] for each in new) > MOST_ALIKE:
                raise Garbage(f"more than {MOST_ALIKE} members of the same hash")
            yield some
            self._look()
