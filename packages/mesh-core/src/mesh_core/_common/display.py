"""Formats values and tables for people: bounded in size, never raising, safe as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

LIMIT = 200
"""Maximum characters of one value."""

ROWS = 20
"""Maximum rows of one table of values."""


def shown(value: object, limit: int = LIMIT) -> str:
    """Return a value's ``repr``, truncated; if it raises, say so instead."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a foreign __repr__ may raise anything
        return f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    return text if len(text) <= limit else text[:limit] + "…"


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number and what it counts: ``1 host``, ``2 hosts``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def runs(texts: Iterable[str]) -> list[tuple[int, int, str]]:
    """Merge equal neighbours: first and last index, and the text.

    >>> runs(["a", "a", "b"])
    [(0, 1, 'a'), (2, 2, 'b')]
    """
    found: list[tuple[int, int, str]] = []
    for index, text in enumerate(texts):
        if found and found[-1][2] == text:
            found[-1] = (found[-1][0], index, text)
        else:
            found.append((index, index, text))
    return found


class Table:
    """Rows of text under a heading."""

    def __init__(self, head: Sequence[str]) -> None:
        self._head = list(head)
        self._rows: list[list[str]] = []

    def add(self, *cells: str) -> None:
        """Append a row; missing cells are empty."""
        self._rows.append([*cells, *[""] * (len(self._head) - len(cells))])

    def text(self, indent: str = "") -> str:
        """Return lines with aligned columns."""
        rows = [[_flat(cell) for cell in row] for row in [self._head, *self._rows]]
        # A row with a single cell does not widen its column.
        measured = [row for row in rows if any(row[1:])]
        widths = [max(len(row[column]) for row in measured) for column in range(len(self._head))]
        lines = (
            "  ".join(_aligned(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return "\n".join(indent + line for line in lines)

    def html(self, caption: str) -> str:
        """Return an HTML table without scripts, and with no styles beyond the layout."""
        head = "".join(f"<th>{_escaped(cell)}</th>" for cell in self._head) if any(self._head) else ""
        body = "".join(
            "<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in self._rows
        )
        return (
            f'<table><caption style="text-align:left;white-space:nowrap">{_escaped(_flat(caption))}</caption>'
            f"{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
        )


def _aligned(cell: str, width: int) -> str:
    return cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)


def _flat(text: str) -> str:
    # Control characters, such as colours and bells, are shown escaped.
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def printable(text: str) -> str:
    r"""Return lines for a terminal: control characters, which programs could have put into names, are shown escaped.

    >>> printable("thread \x1b[2J:\n  f()")
    'thread \\x1b[2J:\n  f()'
    """
    return "\n".join(map(_flat, text.split("\n")))


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _escaped(text: str) -> str:
    import html  # whoever spawns imports this module, and hardly anybody wants HTML

    return html.escape(text)


def _cell(text: str) -> str:
    left = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * left + _escaped(_flat(text[left:]))


def place(point: Mapping[str, int]) -> str:
    """Return coordinates as in ``hosts=1, gpus=3``."""
    return ", ".join(f"{label}={index}" for label, index in point.items())


def ends(count: int, most: int = ROWS) -> tuple[range, int, range]:
    """Return what to show of ``count`` items: the first ones, how many are hidden, the last ones.

    >>> ends(100, 4)
    (range(0, 2), 96, range(98, 100))
    """
    if count <= most:
        return range(count), 0, range(count, count)
    half = most // 2
    return range(half), count - 2 * half, range(count - half, count)


def listed(table: Table, count: int, row: Callable[[int], Sequence[str]]) -> Table:
    """Fill a table with the first and last of ``count`` rows."""
    first, hidden, last = ends(count)
    for index in first:
        table.add(*row(index))
    if hidden:
        table.add(f"… {hidden:,} more …")
    for index in last:
        table.add(*row(index))
    return table


def block(title: str, text: str) -> str:
    """Return HTML with a title and lines under it."""
    lines = "\n".join(_flat(line) for line in text.splitlines())
    return f"<div><b>{_escaped(_flat(title))}</b></div><pre>{_escaped(lines)}</pre>"
