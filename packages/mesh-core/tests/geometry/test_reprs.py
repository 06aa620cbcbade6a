"""How meshes, values and failures are displayed at a prompt and in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from core_samples import Echo

from mesh_core import Extent, MeshFailure, ProcMesh, SupervisionError, ValueMesh, inspect, this_host

pytestmark = pytest.mark.python

VOID = {"br"}
NASTY = "<script>alert('&')</script>\x1b[31m\n\0\ud800"


class Checked(HTMLParser):
    """HTML whose tags are balanced; its text, and the cells of its tables."""

    def __init__(self, source: str) -> None:
        super().__init__()
        source.encode()  # a notebook writes it to a file
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.words = ""
        self.feed(source)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        assert self.tags <= {
            "table",
            "caption",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "div",
            "b",
            "pre",
            "ul",
            "li",
        }

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert all(name == "style" for name, _ in attrs)
        self.tags.add(tag)
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def html(shown: Any) -> Checked:
    return Checked(shown._repr_html_())


class Hostile:
    """A value whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def raises_on_load() -> None:
    raise OSError("gone")


def test_equal_values_are_one_row() -> None:
    mesh = ValueMesh.of(Extent.of(hosts=2, gpus=4), [1, 1, 1, 1, 1, 1, 2, 1])
    assert repr(mesh).splitlines() == ["ValueMesh(hosts=2, gpus=4):", "  0-5: 1", "  6: 2", "  7: 1"]
    rows = html(mesh).rows
    assert rows[1] == ["0-5", "hosts=0, gpus=0 … hosts=1, gpus=1", "1"]
    assert rows[2] == ["6", "hosts=1, gpus=2", "2"]
    assert len(rows) == 4
    part = mesh.slice(hosts=1)
    assert repr(part).splitlines()[1:] == ["  0-1: 1", "  2: 2", "  3: 1"]
    assert html(part).rows[2] == ["2", "gpus=2", "2"]


def test_markup_and_control_characters_are_shown_not_obeyed() -> None:
    page = html(ValueMesh.of(Extent.of(gpus=2), [NASTY, 1]))
    assert "<script>alert" in page.rows[1][2]
    assert "\x1b" not in page.words
    failure = MeshFailure(mesh_name=NASTY, host=NASTY, stderr_tail=(NASTY,), exception=ValueError(NASTY))
    for shown in (failure, SupervisionError(failure=failure)):
        page = html(shown)
        assert "<script>" in page.words
        assert "\x1b" not in page.words


def test_a_value_that_cannot_be_shown_hides_no_other() -> None:
    from mesh_core._geometry.values import lazy

    mesh = ValueMesh.of(Extent.of(gpus=3), [Hostile(), 5, lazy(raises_on_load)])
    lines = repr(mesh).splitlines()
    assert lines[1] == "  0: <Hostile: its repr raised RuntimeError>"
    assert lines[2:] == ["  1: 5", "  2: <cannot be loaded: OSError>"]
    assert html(mesh).rows[2][2] == "5"


def test_huge_meshes_and_values_are_bounded() -> None:
    mesh = ValueMesh.of(Extent.of(gpus=100_000), list(range(100_000)))
    assert len(repr(mesh).splitlines()) < 30
    assert "0: 0" in repr(mesh) and "99999: 99999" in repr(mesh)
    assert len(html(mesh).rows) < 30
    assert len(repr(ValueMesh.of(Extent.of(gpus=2), ["x" * 10**7] * 2))) < 1000
    same = ValueMesh.of(Extent.of(gpus=9_000), [0] * 9_000)
    assert repr(same).splitlines()[1:] == ["  0-8999: 0"]


def test_a_mesh_without_dimensions() -> None:
    one = ValueMesh.of(Extent([], []), ["only"])
    assert repr(one).splitlines()[1:] == ["  0: 'only'"]
    assert html(one).rows[1] == ["0", "", "'only'"]


def test_failures_say_what_died_in_one_line() -> None:
    failure = MeshFailure(
        mesh_name="trainers", rank=3, point={"gpus": 3}, host="b7", pid=4242, signal=9, since=0.0
    )
    told = "rank 3 (gpus=3) of mesh 'trainers' died on host b7, pid 4242: killed by signal 9 (SIGKILL)"
    assert repr(failure) == f"<MeshFailure killed: {told}>"
    assert told in repr(SupervisionError(failure=failure))
    assert "\n" not in repr(SupervisionError(failure=failure))
    assert told in html(failure).words
    assert "since:" in html(SupervisionError(failure=failure)).words


def test_meshes(procs: ProcMesh, echo: Any) -> None:
    assert repr(procs) == "<ProcMesh 'shared': hosts=2, gpus=2>"
    rows = html(procs).rows
    assert [row[0] for row in rows[1:]] == [f"hosts={h}, gpus={g}" for h in (0, 1) for g in (0, 1)]
    assert [row[1] for row in rows[1:]] == [str(pid) for pid in procs.pids]
    assert repr(echo) == "<ActorMesh 'echo' of Echo: hosts=2, gpus=2>"
    assert ["keywords", "(a, b=2, *rest, c, **others)"] in html(echo).rows
    assert this_host()._name in html(this_host()).words


@pytest.mark.parametrize("part", ["all", "one"])
def test_a_snapshot_is_a_table(procs: ProcMesh, part: str) -> None:
    mesh = procs if part == "all" else procs.slice(hosts=0, gpus=1)
    odd = mesh.spawn("<b>&", Echo)
    odd.echo.call(1).get()
    snap = inspect.snapshot()
    page = html(snap)
    assert "shared[1] (hosts=0, gpus=1)" in [row[0] for row in page.rows]
    assert any(row[0].strip() == "<b>&[0] Echo" for row in page.rows)
    assert "<b>&[0] Echo" in repr(snap)
    odd.stop().get()
