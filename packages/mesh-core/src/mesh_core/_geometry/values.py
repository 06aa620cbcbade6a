"""Results of a call to many actors: :class:`ValueMesh`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from mesh_core._geometry.mesh import Mesh, describe
from mesh_core._native import Point, Region

R = TypeVar("R")
S = TypeVar("S")

# How many values are loaded for display, at most.
_MOST_LOADED = 10_000


class _Lazy:
    """A value that has not been unpickled yet."""

    __slots__ = ("load",)

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load


class ValueMesh(Mesh, Generic[R]):
    """One value for each rank of a mesh. Values are unpickled when they are first read.

    >>> from mesh_core import Extent, ValueMesh
    >>> squares = ValueMesh.of(Extent.of(gpus=4), [0, 1, 4, 9])
    >>> squares.item(gpus=3), squares.slice(gpus=slice(1, 3)).values()
    (9, [1, 4])
    >>> for point, value in squares.slice(gpus=slice(0, 2)):
    ...     print(point["gpus"], value)
    0 0
    1 1
    """

    __slots__ = ("_cells", "_region", "_view")

    def __init__(self, region: Region, cells: list[Any], view: Region | None = None) -> None:
        # `cells` are in the order of `region` and shared with slices of this mesh; `view` is the visible part.
        self._region = region
        self._cells = cells
        self._view = region if view is None else view

    @classmethod
    def of(cls, extent: Any, values: Iterable[S]) -> ValueMesh[S]:
        """Make a mesh from plain values in rank order."""
        cells = list(values)
        region = Region.whole(extent)
        if len(cells) != len(region):
            raise ValueError(f"{len(cells)} values do not fill a mesh of {len(region)} ({describe(region)})")
        return ValueMesh(region, cells)

    def _with_region(self, region: Region) -> ValueMesh[R]:
        return ValueMesh(self._region, self._cells, region)

    def _load(self, rank: int) -> R:
        at = self._region.position(rank)
        cell = self._cells[at]
        if isinstance(cell, _Lazy):
            cell = self._cells[at] = cell.load()
        value: R = cell
        return value

    def get(self, rank: int) -> R:
        """Return the value of a rank of this mesh."""
        return self._load(self._view.rank_at(rank))

    def item(self, **coords: int) -> R:
        """Return the one value at these coordinates.

        >>> from mesh_core import Extent
        >>> ValueMesh.of(Extent.of(hosts=1, gpus=2), "ab").item(hosts=0, gpus=1)
        'b'
        """
        region = self._view.slice(**coords) if coords else self._view
        if len(region) != 1:
            raise ValueError(
                f"item({', '.join(f'{k}={v}' for k, v in coords.items())}) names {len(region)} values of a mesh of "
                f"{describe(self._view)}; give a coordinate for every dimension, or use values()"
            )
        return self._load(region.rank_at(0))

    def _indexed(self, place: object) -> str:
        named = ", ".join(f"{label}=0" for label in self._view.labels)
        return (
            f"values.get({place!r}) for the value of a rank, or values.item({named}) for one by its place; "
            f"this mesh has {describe(self._view)}"
        )

    def values(self) -> list[R]:
        """Return all values in rank order."""
        return [self._load(rank) for rank in self._view]

    def items(self) -> list[tuple[Point, R]]:
        """Return every point with its value."""
        return list(self)

    def map(self, change: Callable[[R], S]) -> ValueMesh[S]:
        """Return a mesh of the same shape that holds ``change(value)`` for each value.

        >>> from mesh_core import Extent
        >>> ValueMesh.of(Extent.of(gpus=2), [1, 2]).map(str).values()
        ['1', '2']
        """
        return ValueMesh.of(self.extent, [change(value) for value in self.values()])

    def __iter__(self) -> Iterator[tuple[Point, R]]:
        extent = self._view.extent
        for index, rank in enumerate(self._view):
            yield Point(index, extent), self._load(rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ValueMesh):
            return NotImplemented
        return self.extent == other.extent and self.values() == other.values()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _rebuild, (self.extent, self.values())

    def _runs(self) -> list[tuple[int, int, str]]:
        """Return what is displayed: runs of equal texts, with the places of their ends in this mesh."""
        from mesh_core._common.display import ends, runs, shown

        def text(index: int) -> str:
            try:
                value = self._load(self._view.rank_at(index))
            except Exception as error:  # noqa: BLE001 - what was sent may fail to load in any way
                return f"<cannot be loaded: {type(error).__name__}>"
            return shown(value)

        # Equal neighbours share a row, however many there are, but each must be loaded to be compared.
        first, hidden, last = ends(len(self), _MOST_LOADED)
        found = runs(text(index) for index in first)
        if hidden:
            found.append((first.stop, last.start - 1, f"… {hidden:,} values not loaded …"))
        found += [
            (a + last.start, b + last.start, text) for a, b, text in runs(text(index) for index in last)
        ]
        return found

    def __repr__(self) -> str:
        from mesh_core._common.display import ends

        found = self._runs()
        first, hidden, last = ends(len(found))
        more = [f"  … {hidden:,} more …"] if hidden else []
        lines = [f"  {a}: {text}" if a == b else f"  {a}-{b}: {text}" for a, b, text in found]
        shape = f"ValueMesh({describe(self._view)}):"
        return "\n".join([shape, *lines[: first.stop], *more, *lines[last.start :]])

    def _repr_html_(self) -> str:
        from mesh_core._common.display import Table, listed, place

        extent = self._view.extent
        found = self._runs()

        def row(index: int) -> list[str]:
            a, b, text = found[index]
            where = [place(Point(rank, extent)) for rank in sorted({a, b})]
            return [str(a) if a == b else f"{a}-{b}", " … ".join(where), text]

        table = listed(Table(["rank", "place", "value"]), len(found), row)
        return table.html(f"ValueMesh({describe(self._view)})")


def _rebuild(extent: Any, values: list[Any]) -> ValueMesh[Any]:
    return ValueMesh.of(extent, values)


def lazy(load: Callable[[], Any]) -> Any:
    """Return a cell of a :class:`ValueMesh` that is loaded when it is first read."""
    return _Lazy(load)
