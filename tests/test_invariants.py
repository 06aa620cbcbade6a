"""Invariants have names, such as LDR-1: one definition each, in the module that keeps it, and a test that fails without it.

A definition is a sentence behind the name and a colon, in a docstring or a doc comment (``///``, ``//!``). Everything else is a
mention. In a test, a mention is a citation: the test fails if the invariant does not hold.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import workspace

FOLDERS = ("benchmarks", "crates", "examples", "packages", "tests", "tools")
LEFT_OUT = {"target", "dist", "build", "site", "node_modules", "__pycache__"}
SUFFIXES = (".py", ".pyi", ".rs", ".js")
TESTS = {"tests", "testing", "stress", "benches"}
"""Folders of tests; ``testing`` has the suites that plugins are tested by."""
NO_NAMES = {"AES", "GPU", "ISO", "RFC", "SHA", "UTF"}
"""What reads like the name of an invariant, and is none unless one is defined."""

NAME = re.compile(r"\b([A-Z]{3,4})-(\d{1,2})\b(?:\.\.(\d+)|(?: to \1-)(\d+))?(: )?")


class Mention(NamedTuple):
    """A name in a text."""

    name: str
    path: str


class Found(NamedTuple):
    """All that is said of invariants somewhere."""

    defined: list[Mention]
    mentioned: list[Mention]
    cited: list[Mention]
    """By tests."""


def names_in(text: str, *, defined: bool = False) -> Iterator[str]:
    """The names in a text, ``LDR-1..3`` and ``LDR-1 to LDR-3`` being three; or those alone that it defines."""
    for family, first, last, other, colon in NAME.findall(text):
        if defined and not colon:
            continue
        for number in range(int(first), int(last or other or first) + 1):
            yield f"{family}-{number}"


def docs_of(path: str, text: str) -> str:
    """The docstrings or doc comments in a source file."""
    if path.endswith(".rs"):
        return "\n".join(line for line in text.splitlines() if line.lstrip().startswith(("///", "//!")))
    return "\n".join(re.findall(r'^[ ]*r?"""(.*?)"""', text, flags=re.MULTILINE | re.DOTALL))


def parts_of(path: str, text: str) -> tuple[str, str]:
    """A file's code, and its tests."""
    parts = path.split("/")
    if TESTS & set(parts[:-1]) or parts[-1] == "tests.rs" or parts[-1].startswith("test_"):
        return "", text
    code, mark, tests = text.partition("#[cfg(test)]\nmod ")
    return code, mark + tests


def look(files: Iterable[tuple[str, str]]) -> Found:
    """What the files with these paths and texts say."""
    found = Found([], [], [])
    for path, text in files:
        code, tests = ("", "") if path.endswith(".md") else parts_of(path, text)
        found.defined.extend(Mention(name, path) for name in names_in(docs_of(path, code), defined=True))
        found.mentioned.extend(Mention(name, path) for name in names_in(text))
        found.cited.extend(Mention(name, path) for name in names_in(tests))
    return found


def complaints(found: Found) -> list[str]:
    """What is wrong, and what to do."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, path in found.defined:
        places[name].append(path)
    told = [
        f"{name} is defined in {' and in '.join(paths)}: keep one definition, and mention it elsewhere as ({name}), "
        "or give one of them another name"
        for name, paths in sorted(places.items())
        if len(paths) > 1
    ]
    cited = {each.name for each in found.cited}
    told += [
        f"{name} ({paths[0]}) is cited by no test: cite it in the docstring or comment of the test that fails without it, "
        f"or write that test; where none can be written, say it without the name"
        for name, paths in sorted(places.items())
        if name not in cited
    ]
    families = {name.partition("-")[0] for name in places}
    told += [
        f"{path} mentions {name}, which is defined nowhere: correct the name, or define it where it is kept, as '{name}: ...' in "
        "the module's docstring"
        for name, path in sorted(set(found.mentioned))
        if name not in places
        and (name.partition("-")[0] in families or name.partition("-")[0] not in NO_NAMES)
    ]
    return told


def repository() -> Iterator[tuple[str, str]]:
    """The repository's sources and pages."""
    root = workspace.ROOT
    for top in FOLDERS:
        for folder, folders, files in os.walk(root / top):
            folders[:] = [each for each in folders if each not in LEFT_OUT and not each.startswith(".")]
            for path in (Path(folder, name) for name in files if name.endswith(SUFFIXES)):
                if path != Path(__file__):
                    yield str(path.relative_to(root)), path.read_text()
    for path in (*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("packages/*/*.md")):
        yield str(path.relative_to(root)), path.read_text()


def test_each_invariant_is_defined_once_and_cited_by_a_test() -> None:
    found = look(repository())
    assert len(found.defined) > 200
    wrong = complaints(found)
    assert not wrong, "\n".join(["", *wrong])


PYTHON = '"""Leaders.\n\nLDR-1: one leads.\nLDR-2: none waits.\n"""\n'
RUST = "//! LDR-1: one leads.\n\nfn lead() {} // LDR-1: here.\n\n#[cfg(test)]\nmod tests {\n    // LDR-1\n}\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.py": PYTHON, "tests/test_a.py": "# LDR-1..2"}, []),
        ({"a.py": PYTHON, "tests/test_a.py": "# LDR-1 to LDR-2"}, []),
        ({"a.rs": RUST}, []),
        ({"a.py": PYTHON, "tests/test_a.py": "# LDR-1"}, ["LDR-2 (a.py) is cited by no test"]),
        ({"a.py": PYTHON, "b.rs": RUST, "tests.rs": "// LDR-2"}, ["LDR-1 is defined in a.py and in b.rs"]),
        ({"a.rs": RUST, "b.rs": "// LDR-1: also here"}, []),
        ({"a.rs": RUST, "b.rs": "// LDR-3"}, ["b.rs mentions LDR-3, which is defined nowhere"]),
        ({"a.rs": RUST, "tests/test_a.py": "# LDR-4"}, ["tests/test_a.py mentions LDR-4"]),
        ({"a.rs": RUST, "ARCHITECTURE.md": "One leads (LDR-1, STR-1)."}, ["ARCHITECTURE.md mentions STR-1"]),
        (
            {"a.rs": RUST, "b.py": '"""UTF-8: text."""\n# SHA-256, GPU-0'},
            ["UTF-8 (b.py) is cited by no test"],
        ),
        ({"a.rs": RUST, "b.py": "# UTF-8, SHA-256, GPU-0"}, []),
    ],
)
def test_problems_are_reported_with_a_remedy(files: dict[str, str], said: list[str]) -> None:
    told = complaints(look(files.items()))
    assert len(told) == len(said), told
    for complaint, beginning in zip(told, said, strict=True):
        assert complaint.startswith(beginning)
