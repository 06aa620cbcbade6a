"""Columns for people to read."""

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], *, gap: int = 2) -> str:
    """The rows as lines, every column as wide as its widest cell, the last one as it comes.

    >>> print(aligned([("NAME", "STATUS"), ("doctor", "ok")]))
    NAME    STATUS
    doctor  ok
    """
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        (" " * gap).join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
    return "\n".join(lines)
