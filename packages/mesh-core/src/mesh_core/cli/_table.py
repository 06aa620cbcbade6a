"""Format tables and time spans."""

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], *, gap: int = 2) -> str:
    """Format rows as lines, each column as wide as its widest cell, without trailing spaces.

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


def age(seconds: float) -> str:
    """Format a time span in its largest unit.

    >>> age(2.4), age(7200), age(3 * 86400)
    ('2 s', '2 h', '3 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
