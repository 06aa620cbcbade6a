"""The base class of all meshes: shape and slicing."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing import Self

    from mesh_core._native import Extent, Region


def describe(region: Region) -> str:
    """Describe a region's shape for messages: ``hosts=2, gpus=8``."""
    return ", ".join(f"{label}={size}" for label, size in region.extent.items()) or "a single one"


def check_name(name: object) -> None:
    """Refuse a name that cannot be shown in a line of text; NUL bytes separate names when they are sent."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    # Those of one byte, and those of two, which some terminals obey as well; and what ends a line elsewhere.
    if any(char < " " or "\x7f" <= char <= "\x9f" or char in "\u2028\u2029" for char in name):
        raise ValueError(f"name must have no control characters, got {name!r}")


class Kind(enum.Enum):
    """What a mesh is an array of, for code that cannot import the mesh's class."""

    VALUES = enum.auto()
    HOSTS = enum.auto()
    PROCS = enum.auto()
    ACTORS = enum.auto()


class Mesh:
    """An n-dimensional array of hosts, processes, actors or values, with named dimensions.

    Slicing a mesh returns a mesh of the same things in another shape.

    >>> from mesh_core import Extent, ValueMesh
    >>> mesh = ValueMesh.of(Extent.of(hosts=2, gpus=4), range(8))
    >>> mesh.slice(hosts=1).values()
    [4, 5, 6, 7]
    >>> mesh.slice(gpus=slice(0, 4, 2)).sizes
    {'hosts': 2, 'gpus': 2}
    >>> mesh.flatten("rank").size("rank")
    8
    """

    __slots__ = ()

    _kind: ClassVar[Kind] = Kind.VALUES
    _view: Region

    def _with_region(self, region: Region) -> Self:
        raise TypeError(f"{type(self).__name__} is not a mesh: spawn it on processes first")

    if TYPE_CHECKING:

        def slice(self, **dims: int | slice) -> Self: ...

    else:

        def slice(self, *places: object, **dims: int | slice) -> Self:
            """Return a part of the mesh: an int selects one place and drops the dimension, a slice keeps a range of it."""
            if places:
                raise TypeError(f"slice() takes dimensions by name, {self._example()}, got {places[0]!r}")
            return self._with_region(self._view.slice(**dims))

        def __getitem__(self, place: object) -> Any:
            raise TypeError(
                f"a mesh is not indexed by number, got [{place!r}]: its dimensions have names. "
                f"Write {self._indexed(place)}"
            )

    def _example(self) -> str:
        """Show how to slice this mesh by name, for error messages."""
        labels = self._view.labels
        return (
            f"such as slice({labels[0]}=0); this mesh has {describe(self._view)}"
            if labels
            else "and this mesh has none"
        )

    def _indexed(self, place: object) -> str:
        return self._example().replace("such as ", "mesh.", 1) if self._view.labels else "the mesh itself"

    def split(self, **dims: Any) -> Self:
        """Split a dimension into several: ``split(gpus=("node", "gpu"), gpu=8)``; one of the sizes may be omitted."""
        return self._with_region(self._view.split(**dims))

    def flatten(self, name: str) -> Self:
        """Merge all dimensions into one."""
        return self._with_region(self._view.flatten(name))

    def rename(self, **names: str) -> Self:
        """Rename dimensions: ``rename(gpus="workers")``."""
        return self._with_region(self._view.rename(**names))

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """Return the size of a dimension, the product of several, or, without an argument, of all."""
        if dim is None:
            return len(self._view)
        if isinstance(dim, str):
            return self._view.size(dim)
        return math.prod(self._view.size(one) for one in dim)

    @property
    def _itself(self) -> Any:
        """What repairs and describes the mesh, and is hidden by no endpoint of its actors (END-1)."""
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every dimension."""
        return dict(self._view.extent.items())

    @property
    def extent(self) -> Extent:
        """The names and sizes of the dimensions."""
        return self._view.extent

    def __len__(self) -> int:
        return len(self._view)
