"""Select stopped actors by number, mesh and coordinates, and name a selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh_core._common.errors import MeshError
from mesh_core._common.suggestions import did_you_mean
from mesh_core._features.debug.client import Stop


@dataclass(frozen=True)
class Selection:
    """A selection such as ``trainers,gpus=0:4``.

    >>> Selection.parse("trainers,gpus=0:4")
    Selection(text='trainers,gpus=0:4', meshes=('trainers',), numbers=(), ranges={'gpus': slice(0, 4, None)})
    """

    text: str
    meshes: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    ranges: dict[str, slice] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse a selection: ``all``, numbers from the list, names of meshes, coordinates, separated by commas."""
        meshes: list[str] = []
        numbers: list[int] = []
        ranges: dict[str, slice] = {}
        for term in filter(None, text.replace(" ", ",").split(",")):
            label, equals, index = term.partition("=")
            if equals:
                ranges[label] = _range(term, index)
            elif term.isdecimal():
                numbers.append(int(term))
            elif term != "all":
                meshes.append(term)
        return cls(text, tuple(meshes), tuple(numbers), ranges)

    def pick(self, stops: Sequence[Stop]) -> list[Stop]:
        """Return the selected stops; if there are none, raise a ``MeshError`` that lists what could be selected."""
        if not stops:
            raise MeshError("nothing is stopped")
        found = [stop for number, stop in enumerate(stops) if self._means(number, stop)]
        if not found:
            raise MeshError(f"no stopped actor matches {self.text!r}{self._hint(stops)}")
        return found

    def _means(self, number: int, stop: Stop) -> bool:
        if self.numbers and number not in self.numbers:
            return False
        if self.meshes and stop.mesh not in self.meshes:
            return False
        return all(
            label in stop.coordinates and _contains(wanted, stop.coordinates[label])
            for label, wanted in self.ranges.items()
        )

    def _hint(self, stops: Sequence[Stop]) -> str:
        labels = sorted({label for stop in stops for label in stop.coordinates})
        for label in self.ranges:
            if label not in labels:
                return did_you_mean(label, labels) or f"; the dimensions are: {', '.join(labels) or 'none'}"
        meshes = sorted({stop.mesh for stop in stops})
        for mesh in self.meshes:
            if mesh not in meshes:
                return did_you_mean(mesh, meshes) or f"; the meshes are: {', '.join(meshes)}"
        return "; 'list' shows what is stopped"


def _range(term: str, index: str) -> slice:
    parts = index.split(":")
    try:
        bounds = [int(part) if part else None for part in parts]
    except ValueError:
        bounds = [-1]
    start, stop, step = (*bounds, None, None, None)[:3]
    if len(parts) > 3 or any(bound is not None and bound < 0 for bound in bounds) or step == 0 or index == "":
        raise MeshError(f"a coordinate must be like gpus=2, gpus=0:4 or gpus=0:8:2, got {term!r}")
    if len(parts) == 1:
        assert start is not None
        return slice(start, start + 1)
    return slice(start, stop, step)


def _contains(wanted: slice, index: int) -> bool:
    first = wanted.start or 0
    return (
        index >= first
        and (wanted.stop is None or index < wanted.stop)
        and (index - first) % (wanted.step or 1) == 0
    )


def names(stops: Sequence[Stop]) -> str:
    """Name several stops in few words, such as ``trainers gpus=0:4``.

    >>> names([])
    ''
    """
    by_mesh: dict[tuple[int, str], list[Stop]] = {}
    for stop in stops:
        by_mesh.setdefault((stop.job, stop.mesh), []).append(stop)
    return "; ".join(_names(mesh, group) for (_, mesh), group in by_mesh.items())


def _names(mesh: str, stops: list[Stop]) -> str:
    places = [stop.coordinates for stop in stops]
    varying = [label for label in places[0] if len({place.get(label) for place in places}) > 1]
    if len(varying) == 1:
        indexes = sorted({place[varying[0]] for place in places if varying[0] in place})
        if len(indexes) == len(places) and indexes[-1] - indexes[0] == len(indexes) - 1:
            parts = [
                f"{label}={indexes[0]}:{indexes[-1] + 1}" if label in varying else f"{label}={index}"
                for label, index in places[0].items()
            ]
            return f"{mesh} {','.join(parts)}"
    shown = [",".join(f"{label}={index}" for label, index in place.items()) for place in places]
    return f"{mesh} {' '.join(shown)}".rstrip()
