"""What a tensor looks like on its mesh, for people: in a terminal, and in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import Point
from mesh_tensor._values import of_mesh

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

ROWS = 32
"""Of a larger mesh, the first and the last processes are shown."""
SIDE = 16
"""The most pieces of one dimension that are drawn; with more, the tensor is cut too finely for a picture."""


@dataclass(frozen=True)
class Part:
    """One process's part of a tensor."""

    point: Point
    shape: tuple[int, ...]
    start: tuple[int, ...]
    """Where it begins in the whole tensor; zeros in the per-rank view, in which each process has a tensor of its own."""
    nbytes: int
    low: float | None
    """The smallest of its values; ``None`` if there is none, or they have no order."""
    mean: float | None
    high: float | None
    odd: int
    """The number of values that are not finite."""
    failed: str | None
    """Why it is missing."""


@dataclass(frozen=True)
class Inspection:
    """The layout of a tensor on its mesh. Printed, or at the end of a notebook cell, it is a picture."""

    title: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...] | None
    """PyTorch's, for each dimension of the mesh; ``None`` in the per-rank view."""
    parts: list[Part]

    def __str__(self) -> str:
        return "\n".join([self.title, *self._picture(), *_aligned(self._rows())])

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        body = "".join(_row("td", row) for row in rows)
        picture = html.escape("\n".join(self._picture()))
        return (
            f"<div><b>{html.escape(self.title)}</b></div>"
            + (f'<pre style="line-height:1.1">{picture}</pre>' if picture else "")
            + f"<table><thead>{_row('th', head)}</thead><tbody>{body}</tbody></table>"
        )

    def _rows(self) -> list[list[str]]:
        rows = [["process", "shape", "begins at", "bytes", "least", "mean", "greatest", "not finite"]]
        for part in _ends(self.parts):
            if part is None:
                rows.append([f"… {len(self.parts) - ROWS:,} more …"])
            elif part.failed is not None:
                rows.append([_place(part.point), part.failed])
            else:
                numbers = [
                    "-" if each is None else f"{each:.5g}" for each in (part.low, part.mean, part.high)
                ]
                places = [str(part.shape), str(part.start), f"{part.nbytes:,}"]
                rows.append([_place(part.point), *places, *numbers, f"{part.odd:,}"])
        if self.placements is None:
            for row in rows:
                del row[2:3]
        return rows

    def _picture(self) -> list[str]:
        """Draw which processes have which part of the tensor, along the dimensions that are split."""
        there = [part for part in self.parts if part.failed is None]
        if self.placements is None or not there or not self.shape:
            return []
        cuts = [
            sorted({(each.start[dim], each.shape[dim]) for each in there}) for dim in range(len(self.shape))
        ]
        cut = [dim for dim, pieces in enumerate(cuts) if len(pieces) > 1]
        if len(cut) > 2 or any(len(cuts[dim]) > SIDE for dim in cut):
            return []
        # As matrices are written, if possible.
        down = cut[0] if len(cut) == 2 else 0
        across = next((dim for dim in reversed(cut) if dim != down), 1 if len(self.shape) > 1 else None)
        down_pieces, across_pieces = cuts[down], [(0, 0)] if across is None else cuts[across]
        cells: dict[tuple[int, int], list[str]] = {}
        for part in there:
            row = down_pieces.index((part.start[down], part.shape[down]))
            column = 0 if across is None else across_pieces.index((part.start[across], part.shape[across]))
            cells.setdefault((row, column), []).append(",".join(str(at) for at in part.point.values()))
        texts = [
            [_listed(cells.get((row, column), [])) for column in range(len(across_pieces))]
            for row in range(len(down_pieces))
        ]
        heads = ["" if across is None else f"{start}:{start + size}" for start, size in across_pieces]
        widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
        sides = [f"{start}:{start + size}" for start, size in down_pieces]
        margin = max(map(len, sides))
        lines = [
            f"dimension {down} goes down" + ("" if across is None else f", dimension {across} across"),
            *([] if across is None else [_line(" " * margin, " ", heads, widths)]),
            _rule(margin, "┌┬┐", widths),
        ]
        for row, (side, text) in enumerate(zip(sides, texts, strict=True)):
            if row:
                lines.append(_rule(margin, "├┼┤", widths))
            lines.append(_line(side.rjust(margin), "│", text, widths))
        return [*lines, _rule(margin, "└┴┘", widths)]


def inspect(tensor: torch.Tensor, *, timeout: float | None = None) -> Inspection:
    """Wait for a tensor, and return its layout: which process has which part, its size, and a summary of its values.

    For a process on which the tensor could not be computed, the reason is shown.

    >>> import torch
    >>> from mesh_tensor import Mesh, distribute, inspect
    >>> with Mesh((2,), ("data",)) as mesh:
    ...     print(inspect(distribute(torch.arange(8.0).view(4, 2), mesh, ["data", None])))
    GlobalTensor (4, 2) of float32 on Mesh(data=2), data: Shard(dim=0)
    dimension 0 goes down, dimension 1 across
          0:2
        ┌─────┐
    0:2 │ 0   │
        ├─────┤
    2:4 │ 1   │
        └─────┘
    process  shape   begins at  bytes  least  mean  greatest  not finite
    data=0   (2, 2)  (0, 0)     16     0      1.5   3         0
    data=1   (2, 2)  (2, 0)     16     4      5.5   7         0
    """
    placements: tuple[Placement, ...] | None = None
    held: Any = tensor
    if getattr(type(tensor), "is_global", False):
        stream, placements = held.descriptor.stream, held.placements
        names = zip(held.mesh.mesh_dim_names, placements or (), strict=True)
        where = f"{held.mesh}, {', '.join(f'{name}: {placement!r}' for name, placement in names)}"
        stream.check()
        question: tuple[Any, ...] = ("within", stream.number, "look")
    else:
        held = of_mesh(tensor)
        stream, where = held.descriptor.stream, str(held.procs)
        question = ("look",)
    title = f"{type(held).__name__} {held.descriptor} on {where}"
    with _disable_current_modes():
        stream.tensors.guard.check_value("looking at it", held)
        answers = stream.wait(stream.ask(*question, held.ref.number), timeout)
        parts = [Part(point, *_facts(answer)) for point, answer in answers]
    return Inspection(title, tuple(held.shape), placements, parts)


def show(tensor: torch.Tensor, *, timeout: float | None = None, **coords: int) -> None:
    """Wait for a tensor, and print the part of one process: the one at these coordinates, by default the first.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import rank_tensor, show
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     show(rank_tensor(procs, "gpus") * 10, gpus=1)
    MeshTensor () of int64 on <ProcMesh ...>, at gpus=1:
    tensor(10)
    """
    from mesh_tensor._view import fetch_shard

    value = fetch_shard(tensor, timeout=timeout, shard=coords)
    held: Any = tensor
    sizes = held.descriptor.stream.procs.sizes
    at = ", ".join(f"{dim}={coords.get(dim, 0)}" for dim in sizes)
    where = held.mesh if getattr(type(tensor), "is_global", False) else held.procs
    print(f"{type(tensor).__name__} {held.descriptor} on {where}, at {at or 'its only process'}:\n{value!r}")  # noqa: T201 - what it is for


def _facts(answer: Any) -> Any:
    kind, *rest = answer
    if kind == "failed":
        _, operator, error, _ = rest
        return (), (), 0, None, None, None, 0, f"{operator} failed: {error}"
    return rest[0]


def _place(point: Point) -> str:
    return ", ".join(f"{dim}={at}" for dim, at in point.items()) or "the only one"


def _ends(parts: list[Part]) -> Iterator[Part | None]:
    if len(parts) <= ROWS:
        yield from parts
    else:
        yield from parts[: ROWS // 2]
        yield None
        yield from parts[-(ROWS // 2) :]


def _listed(names: list[str], most: int = 8) -> str:
    return " ".join(names) if len(names) <= most else f"{' '.join(names[:most])} … {len(names) - most} more"


def _line(side: str, bar: str, texts: Sequence[str], widths: Sequence[int]) -> str:
    cells = f" {bar} ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True))
    return f"{side} {bar} {cells} {bar}".rstrip()


def _rule(margin: int, corners: str, widths: Sequence[int]) -> str:
    left, middle, right = tuple(corners)
    return f"{' ' * margin} {left}{middle.join('─' * (width + 2) for width in widths)}{right}"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Return rows in columns; a row with a single text may use the whole line."""
    full = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[column]) for row in full) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def _row(tag: str, cells: Sequence[str]) -> str:
    wide = ' colspan="7"'
    spans = ["", wide] if len(cells) == 2 else [""] * len(cells)
    return (
        "<tr>"
        + "".join(
            f"<{tag}{span}>{html.escape(cell)}</{tag}>" for cell, span in zip(cells, spans, strict=False)
        )
        + "</tr>"
    )
