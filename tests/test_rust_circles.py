"""The check that files of a crate do not use each other in a circle."""

from pathlib import Path

import pytest

import rust_circles


def crate(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("use crate::other::{A, deep::B};", "use super::one;"),
        ("use super::{\n    other::A,\n};", "fn f() { crate::one::g(); }"),
        ("fn f(a: crate::other::A) {}", "use crate::One as Renamed;"),
    ],
)
def test_two_files_that_use_each_other_are_a_circle(tmp_path: Path, one: str, other: str) -> None:
    lib = "mod one;\nmod other;\npub use one::One;\n"
    lines = rust_circles.report(crate(tmp_path, {"lib.rs": lib, "one.rs": one, "other.rs": other}))
    assert lines == [
        f"{tmp_path}: 2 files use each other:",
        "  src/one.rs uses src/other.rs",
        "  src/other.rs uses src/one.rs",
    ]


def test_a_circle_through_others_is_found(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod a;\nmod b;\nmod c;\nmod above;\n",
        "a.rs": "use crate::b::B;",
        "b/mod.rs": "mod inner;\npub(crate) use inner::B;\n",
        "b/inner.rs": "use crate::c;",
        "c.rs": "use crate::a::A;",
        "above.rs": "use crate::{a, b, c};",
    }
    assert rust_circles.circles(rust_circles.uses(crate(tmp_path, files))) == [
        [("a",), ("b", "inner"), ("c",)]
    ]


@pytest.mark.parametrize(
    "one",
    [
        "//! See [`crate::other`].",
        'const TEXT: &str = "crate::other::A";',
        "#[cfg(test)]\nmod tests {\n    use crate::other::A;\n}\n",
        "#[cfg(test)]\nmod tests;\n",
        "mod inner {\n    use super::C;\n}\n",
        "use other_crate::one::other;",
    ],
)
def test_what_is_no_use_of_another_file(tmp_path: Path, one: str) -> None:
    files = {
        "lib.rs": "mod one;\nmod other;\npub use one::C;\n",
        "one.rs": one,
        "one/tests.rs": "use crate::other::A;",
        "other.rs": "use crate::one::C;",
    }
    if "mod tests;" not in one:
        del files["one/tests.rs"]
    assert rust_circles.report(crate(tmp_path, files)) == []


def test_a_module_that_exports_what_is_in_its_children_does_not_use_them(tmp_path: Path) -> None:
    files = {
        "lib.rs": "mod one;\n",
        "one/mod.rs": "mod inner;\npub use inner::A;\npub struct B;\n",
        "one/inner.rs": "use super::B;",
    }
    assert rust_circles.report(crate(tmp_path, files)) == []
    files["one/mod.rs"] += "fn f(a: A) {}\n"
    assert len(rust_circles.circles(rust_circles.uses(crate(tmp_path, files)))) == 1, "here it does"
