"""Run the Python blocks of one Markdown page, in order, in one namespace: `python doc_page.py PAGE`.

A block with `>>>` prompts is checked like a doctest, any other is executed; `await` works at the top of a block, as
in a notebook. Line numbers in tracebacks are the page's own. Nothing outside the standard library is imported, so
that a page meets the interpreter in the state its readers would.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OPEN = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
_NOT_RUN = re.compile(r"<!-- example: not run, because \S.* -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of Python; `line` is the number of its first line, counted from one."""

    line: int
    code: str
    runs: bool


def blocks(text: str) -> Iterator[Block]:
    r"""The Python blocks of a page, in order.

    Example:
        >>> [(block.line, block.code) for block in blocks("```python\n1 + 1\n```\n")]
        [(2, '1 + 1\n')]
    """
    lines = iter(enumerate(text.splitlines(), start=1))
    said = ""
    for _, line in lines:
        opening = _OPEN.match(line)
        if opening is None:
            said = line.strip() or said
            continue
        body, first = [], 0
        for number, inner in lines:
            if inner.strip() == opening["fence"]:
                break
            first = first or number
            body.append(inner)
        if opening["info"].strip().split(" ")[0] in {"python", "py", "pycon"}:
            code = textwrap.dedent("\n".join(body)) + "\n"
            yield Block(first, code, runs=_NOT_RUN.fullmatch(said) is None)
        said = ""


def run_page(path: Path) -> int:
    """Run all blocks of the page; return how many doctest examples did not print what they should."""
    text = path.read_text(encoding="utf-8")
    # Pickling looks classes up in __main__: the page takes that place, as a script or a notebook would.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    failed = 0
    with asyncio.Runner() as runner:
        for block in blocks(text):
            if not block.runs:
                continue
            if ">>>" in block.code:
                failed += _check(block, path, main)
            else:
                _execute(block, path, main, runner)
    return failed


def _execute(block: Block, path: Path, main: types.ModuleType, runner: asyncio.Runner) -> None:
    padded = "\n" * (block.line - 1) + block.code
    code = compile(padded, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, vars(main)))
    else:
        exec(code, vars(main))


def _check(block: Block, path: Path, main: types.ModuleType) -> int:
    parsed = doctest.DocTestParser().get_doctest(block.code, vars(main), path.stem, str(path), block.line - 1)
    parsed.globs = vars(main)  # not a copy: later blocks go on with what this one defines
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    return runner.run(parsed, clear_globs=False).failed


if __name__ == "__main__":
    # sys.path[0] is this folder; readers have their own, which is none of ours.
    sys.path[0] = ""
    sys.exit(1 if run_page(Path(sys.argv[1]).resolve()) else 0)
