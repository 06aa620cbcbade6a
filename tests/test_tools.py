"""What the sessions are made of: the sum of all tests, the order of packages, pins, and examples of the docs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import doc_page
import workspace
from bytecode import Bytecode
from tally import Tally

TOOLS = workspace.ROOT / "tools"


def tally(text: str) -> str:
    counted = Tally()
    for line in text.splitlines():
        counted.feed(line)
    return str(counted)


def test_tally_sums_pytest_and_cargo_over_sessions():
    output = """
\x1b[32m================== \x1b[32m\x1b[1m9 passed\x1b[0m, \x1b[33m1 skipped\x1b[0m\x1b[32m in 1.02s ==================\x1b[0m
nox > Session tests-3.11(mesh-core) was successful in 2 seconds.
test result: ok. 5 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.00s
nox > Session rust was successful in 12 seconds.
===== 1 failed, 2 passed, 1 xfailed, 3 errors in 61.20s (0:01:01) =====
nox > Session integration failed.
"""
    assert tally(output) == "17 passed, 4 failed, 3 skipped"


def test_tally_counts_a_session_that_fails_outside_its_tests():
    output = """
nox > Session lint failed.
===== 2 passed in 0.20s =====
nox > Session docs failed.
nox > Session demo was successful.
"""
    assert tally(output) == "2 passed, 2 failed, 0 skipped"


def test_tally_ignores_what_only_looks_like_a_sum():
    assert (
        tally("3 passed in my opinion\n==== FAILURES ====\nexpected: 4 failed")
        == "0 passed, 0 failed, 0 skipped"
    )


def write_package(folder: Path, name: str, *dependencies: str) -> None:
    (folder / "packages" / name).mkdir(parents=True)
    text = f'[project]\nname = "{name}"\nversion = "1.2"\ndependencies = {list(dependencies)!r}\n'
    (folder / "packages" / name / "pyproject.toml").write_text(text)


def test_packages_come_after_those_they_need(tmp_path):
    write_package(tmp_path, "a-top", "b-middle>=1", "numpy")
    write_package(tmp_path, "b-middle", "C_Base>=1")
    write_package(tmp_path, "c-base")
    found = workspace.packages(tmp_path)
    assert [package.name for package in found] == ["c-base", "b-middle", "a-top"]
    assert [package.name for package in workspace.closure(found[2], found)] == ["c-base", "b-middle", "a-top"]
    assert [package.name for package in workspace.closure(found[0], found)] == ["c-base"]


@pytest.mark.parametrize(
    ("requirement", "pin"),
    [
        ("pluggy>=1.5", "pluggy==1.5"),
        ("mesh-core>=0.1,<0.2", "mesh-core==0.1"),
        ("a~=2.3", "a==2.3"),
        ("a>=1,>=1.10", "a==1.10"),
        ("a[x]>=1; python_version < '3.12'", 'a[x]==1 ; python_version < "3.12"'),
    ],
)
def test_lowest_version(requirement, pin):
    assert workspace.lowest(Requirement(requirement)) == pin


def test_lowest_version_needs_a_floor():
    with pytest.raises(ValueError, match="state the lowest that works"):
        workspace.lowest(Requirement("pluggy<2"))


PAGE = """
```python
class A:
    value = 1
```

<!-- example: not run, because it needs two machines -->

```python
raise SystemExit("ran")
```

```python
>>> A.value + 1
2
```

```console
$ not python
```

   ~~~python
   import asyncio
   await asyncio.sleep(0)
   assert __name__ == "__main__" and A.__module__ == "__main__"
   ~~~
"""


def run_page(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return subprocess.run(
        [sys.executable, str(TOOLS / "doc_page.py"), str(page)], capture_output=True, text=True, timeout=30
    )


def test_blocks_of_a_page():
    found = list(doc_page.blocks(PAGE))
    assert [(block.line, block.runs) for block in found] == [(3, True), (10, False), (14, True), (23, True)]
    assert found[3].code.startswith("import asyncio\n")


def test_page_runs_in_order_in_one_namespace(tmp_path):
    done = run_page(tmp_path, PAGE)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_page_error_points_into_the_page(tmp_path):
    done = run_page(tmp_path, "text\n\n```python\nx = 1\nx / 0\n```\n")
    assert done.returncode == 1
    assert 'page.md", line 5' in done.stderr
    assert "x / 0" in done.stderr


def test_page_with_a_wrong_result_fails(tmp_path):
    done = run_page(tmp_path, "```python\n>>> 1 + 1\n3\n```\n")
    assert done.returncode == 1
    assert "Expected:\n    3" in done.stdout


@pytest.mark.slow
def test_pages_are_collected_by_pytest(tmp_path):
    (tmp_path / "good.md").write_text("```python\nassert True\n```\n")
    (tmp_path / "bad.md").write_text("```python\nprint('said')\nassert False\n```\n")
    (tmp_path / "empty.md").write_text("no code\n")
    (tmp_path / "optional.md").write_text(
        "<!-- example: needs no_such_module -->\n```python\nassert False\n```\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "doc_examples",
        "-c",
        str(workspace.ROOT / "pyproject.toml"),
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert "1 failed, 1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "said" in done.stdout


def installed(folder: Path, text: str) -> Path:
    """An environment's packages: one module in a package, as an installer leaves it in each."""
    package = folder / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text(text)
    os.utime(package / "module.py", (1_700_000_000, 1_700_000_000))
    return folder


def imported(packages: Path) -> tuple[str, int]:
    """What the module says, and which file its compiled form is after it was imported."""
    code = "import package.module as it; print(it.SAID)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=True,
    )
    (compiled,) = (packages / "package" / "__pycache__").glob("module.*.pyc")
    return done.stdout.strip(), compiled.stat().st_ino


def test_what_one_environment_has_compiled_the_next_one_takes(tmp_path):
    shared = Bytecode(tmp_path / "shared")
    first = installed(tmp_path / "first", "SAID = 'this'\n")
    shared.lend(first)  # nothing yet
    said, compiled = imported(first)
    shared.keep(first)
    second = installed(tmp_path / "second", "SAID = 'this'\n")
    shared.lend(second)
    assert imported(second) == (said, compiled) == ("this", compiled)


def test_what_was_compiled_from_another_version_is_not_taken(tmp_path):
    shared = Bytecode(tmp_path / "shared")
    first, second = (installed(tmp_path / name, f"SAID = '{name}'\n") for name in ("first", "second"))
    _, old = imported(first)
    shared.keep(first)
    shared.lend(second)
    said, new = imported(second)
    assert (said, new != old) == ("second", True)
    shared.keep(second)
    assert imported(first) == ("first", old)
    third = installed(tmp_path / "third", "SAID = 'second'\n")
    shared.lend(third)
    assert imported(third) == ("second", new)


def test_compiled_modules_whose_source_is_not_installed_are_not_lent(tmp_path):
    shared = Bytecode(tmp_path / "shared")
    first = installed(tmp_path / "first", "SAID = 1\n")
    imported(first)
    shared.keep(first)
    (tmp_path / "other" / "package").mkdir(parents=True)
    shared.lend(tmp_path / "other")
    assert not list(tmp_path.glob("other/**/*.pyc"))


def test_all_modules_are_imported_and_what_cannot_be_is_named(tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "__main__.py": "raise SystemExit('a program ran')",
        "wants.py": "import something_that_is_not_there",
        "inner/__init__.py": "",
        "inner/good.py": "print('good is imported')",
    }
    for name, text in files.items():
        (package / name).write_text(text)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(TOOLS / "import_all.py"), "package"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "good is imported",
        "package.wants was passed over: it needs something_that_is_not_there",
    ]
    for broken in ("1 / 0", "import package.not_there"):
        (package / "inner" / "bad.py").write_text(broken)
        done = run()
        assert done.returncode == 1
        assert "bad.py" in done.stderr
