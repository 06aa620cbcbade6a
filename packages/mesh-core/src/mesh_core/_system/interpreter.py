"""How Mesh starts interpreters.

PTH-1: no interpreter that Mesh starts imports anything from its working directory, where another user may have put modules;
then it looks for modules where the script does.
PTH-3: programs of users find the ``sys.flags`` that they would find without that, and so do the interpreters that they start.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import namedtuple
from typing import Any

from mesh_core._system import search_path

_SAFELY = "-Pc"
"""From the first import on, which may come before the first line of a program. Users write these options in two words."""
_ISOLATED = "-ISc"


def python_command(
    code: str, *arguments: str, python: str | None = None, isolated: bool = False
) -> list[str]:
    r"""Return the command that runs some code in another interpreter, which imports nothing from its working directory.

    >>> import subprocess
    >>> from mesh_core import python_command
    >>> subprocess.run(python_command("import sys; print('' in sys.path)"), capture_output=True, text=True).stdout
    'False\n'

    Args:
        code: what it runs.
        arguments: the rest of its ``sys.argv``.
        python: the interpreter, of Python 3.11 or newer; by default the one that runs this.
        isolated: whether it has only the standard library, and ignores variables such as ``PYTHONPATH``.
    """
    return [python or sys.executable, _ISOLATED if isolated else _SAFELY, code, *arguments]


def interpreter_words(python: str | None) -> list[str]:
    """Return the command of an interpreter like this one, to be continued by :func:`code_words`."""
    # The flags of this interpreter (-O, -W, -X ...) apply to its workers too.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if sys.flags.safe_path and not sys.flags.isolated and not _is_asked_for():
        flags.remove("-P")
    return [python or sys.executable, *flags]


def code_words(code: str, *arguments: str) -> list[str]:
    """Return the words that have an interpreter run some code, and import nothing from its working directory."""
    return [_SAFELY, code, *arguments]


def runs_code() -> bool:
    """Whether this interpreter runs code that it was given on its command line."""
    return sys.argv[:1] == ["-c"]


@functools.cache
def searching(code: str) -> str:
    """Return some code after that of :mod:`search_path`, for interpreters in which nothing of Mesh can be imported yet."""
    with open(search_path.__file__) as file:  # noqa: PTH123 - pathlib takes longer to import than this package may
        return file.read() + code


def _is_asked_for() -> bool:
    """Whether this interpreter has a safe path not only because Mesh has started it."""
    words = sys.orig_argv
    if _SAFELY not in words:
        return True
    flags = words[1 : words.index(_SAFELY)]
    environment = "" if sys.flags.ignore_environment else os.environ.get("PYTHONSAFEPATH", "")
    return bool(sys.flags.isolated or environment or "-P" in flags)


def show_flags_of_users() -> None:
    """Before code of users runs: have ``sys.flags`` show the script's flags, without what Mesh has added (PTH-3).

    Otherwise interpreters that are started with the flags of this one, as by multiprocessing, would differ too.
    """
    if not sys.flags.safe_path or _is_asked_for():
        return
    flags: Any = sys.flags
    if hasattr(flags, "__replace__"):
        flags = flags.__replace__(safe_path=False)
    else:
        # Nobody can make another object of its class before Python 3.13.
        names = type(flags).__match_args__
        kind: Any = namedtuple("flags", names, module="sys")  # type: ignore[misc] # noqa: PYI024
        flags = kind(**{**{name: getattr(flags, name) for name in names}, "safe_path": False})
    sys.flags = flags
