"""Results of a call to many: :class:`ValueMesh`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from mesh_core._mesh import Mesh, describe
from mesh_core._native import Point, Region

R = TypeVar("R")


class _Lazy:
    """A value that is still a message; loaded when it is asked for."""

    __slots__ = ("load",)

    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load


class ValueMesh(Mesh, Generic[R]):
    """One value for every rank of a mesh. Values are unpickled when they are looked at.

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
        # `cells` lie in the order of `region`, which slices of this mesh share; `view` is the part that is seen.
        self._region = region
        self._cells = cells
        self._view = region if view is None else view

    @classmethod
    def of(cls, extent: Any, values: Any) -> ValueMesh[Any]:
        """Make one from plain values in the order of ranks."""
        cells = list(values)
        region = Region.whole(extent)
        if len(cells) != len(region):
            raise ValueError(f"{len(cells)} values do not fill a mesh of {len(region)} ({describe(region)})")
        return cls(region, cells)

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
        """The value of a rank of this mesh."""
        return self._load(self._view.rank_at(rank))

    def item(self, **coords: int) -> R:
        """The one value at these coordinates.

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

    def values(self) -> list[R]:
        """All values, in the order of ranks."""
        return [self._load(rank) for rank in self._view]

    def items(self) -> list[tuple[Point, R]]:
        """Every point with its value."""
        return list(self)

    def map(self, change: Callable[[R], Any]) -> ValueMesh[Any]:
        """A mesh of the same shape of ``change(value)``."""
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

    def __repr__(self) -> str:
        lines = [f"ValueMesh({describe(self._view)}):"]
        runs: list[tuple[int, int, str]] = []
        for index, value in enumerate(self.values()):
            text = repr(value)
            if len(text) > 200:
                text = text[:200] + "…"
            if runs and runs[-1][2] == text:
                runs[-1] = (runs[-1][0], index, text)
            else:
                runs.append((index, index, text))
        if len(runs) > 20:
            runs = [*runs[:10], (-1, -1, f"… {len(runs) - 20} more …"), *runs[-10:]]
        for first, last, text in runs:
            where = "" if first < 0 else f"{first}: " if first == last else f"{first}-{last}: "
            lines.append(f"  {where}{text}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        import html

        rows = "".join(
            f"<tr><td>{html.escape(', '.join(f'{k}={v}' for k, v in point.items()))}</td>"
            f"<td><code>{html.escape(repr(value)[:200])}</code></td></tr>"
            for point, value in self
        )
        return f"<table><caption>ValueMesh({describe(self._view)})</caption>{rows}</table>"


def _rebuild(extent: Any, values: list[Any]) -> ValueMesh[Any]:
    return ValueMesh.of(extent, values)


def lazy(load: Callable[[], Any]) -> Any:
    """A cell of a :class:`ValueMesh` that is loaded when it is looked at."""
    return _Lazy(load)
