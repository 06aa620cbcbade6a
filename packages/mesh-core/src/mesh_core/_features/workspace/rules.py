"""Exclude files of a directory tree by patterns like those of ``.gitignore``."""

from __future__ import annotations

import re
from collections.abc import Iterable

OWN = ".mesh-workspace"
"""The folder in a copy for its index and arriving files; never part of a workspace."""

DEFAULT = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    "*.py[co]",
    ".venv/",
    "venv/",
    "node_modules/",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    ".ipynb_checkpoints",
    ".tox",
    ".nox",
    "*.egg-info",
    ".DS_Store",
    "/build/",
    "/dist/",
    "/target/",
)
"""Excluded unless a pattern that begins with ``!`` re-includes it: version control, caches, environments, build outputs."""


class Rules:
    """Patterns of excluded paths. The last pattern that matches decides.

    A pattern without a slash (except at its end) matches names at any depth; others match paths from the top. ``*``
    matches anything but a slash, ``**`` anything, ``?`` one character, ``[ab]`` one of several. A slash at the end
    restricts a pattern to directories; ``!`` at the beginning re-includes what was excluded before.

    >>> rules = Rules(["*.log", "!keep.log", "/data/*.bin"])
    >>> [rules.leaves_out(path, False) for path in ("a/x.log", "a/keep.log", "data/x.bin", "a/data/x.bin")]
    [True, False, True, False]
    """

    def __init__(self, patterns: Iterable[str], defaults: Iterable[str] = DEFAULT) -> None:
        groups: list[tuple[bool, list[str], list[str]]] = []
        for pattern in (*defaults, *patterns):
            negative, body = pattern.startswith("!"), pattern.removeprefix("!")
            if not body.strip("/"):
                raise ValueError(
                    f"exclude={pattern!r} matches nothing; give a name such as '*.ckpt' or '/data/'"
                )
            if not groups or groups[-1][0] is not negative:
                groups.append((negative, [], []))
            _, anything, folders = groups[-1]
            (folders if body.endswith("/") else anything).append(_translate(body))
        # Adjacent patterns of one kind form one expression: trees have many files, and most match none.
        self._groups = [
            (negative, _any_of(anything), _any_of(anything + folders))
            for negative, anything, folders in reversed(groups)
        ]

    def leaves_out(self, path: str, is_dir: bool) -> bool:
        """Return whether a path, from the top and with slashes, is excluded."""
        for negative, anything, folders in self._groups:
            if (folders if is_dir else anything).fullmatch(path):
                return not negative
        return False


def _any_of(expressions: list[str]) -> re.Pattern[str]:
    # Without expressions, the result matches nothing.
    return re.compile("|".join(expressions) or "(?!)", re.DOTALL)


def _translate(pattern: str) -> str:
    body = pattern.rstrip("/")
    anchored = "/" in body
    out, at = [], 0
    body = body.lstrip("/")
    while at < len(body):
        char = body[at]
        if body.startswith("**/", at):
            out.append("(?:.*/)?")
            at += 3
        elif body.startswith("**", at):
            out.append(".*")
            at += 2
        elif char == "[" and (end := body.find("]", at + 2)) > 0:
            inner = body[at + 1 : end].replace("\\", "\\\\")
            negated = inner[0] in "!^"
            chars = re.sub(r"([\[^])", r"\\\1", inner[1:] if negated else inner)
            out.append(f"[{'^/' if negated else ''}{chars}]")
            at = end + 1
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(char) or re.escape(char))
            at += 1
    return f"(?:{'' if anchored else '(?:.*/)?'}{''.join(out)})"
