"""What people see of tensors on a mesh."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from mesh_tensor import Mesh, distribute, inspect, rank_tensor, remote, share, show  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]


@pytest.fixture(scope="module")
def mesh(grid: ProcMesh) -> Any:
    with Mesh((2, 2), ("data", "model"), grid) as mesh:
        yield mesh


def picture(tensor: Any) -> list[str]:
    """The lines between the title and the table."""
    lines = str(inspect(tensor, timeout=60)).splitlines()
    return lines[1 : next(at for at, line in enumerate(lines) if line.startswith("process"))]


def test_a_tensor_that_is_cut_in_two_dimensions_is_a_grid(mesh: Mesh) -> None:
    x = distribute(torch.arange(24.0).view(6, 4), mesh, ["data", "model"])
    assert picture(x) == [
        "dimension 0 goes down, dimension 1 across",
        "      0:2   2:4",
        "    ┌─────┬─────┐",
        "0:3 │ 0,0 │ 0,1 │",
        "    ├─────┼─────┤",
        "3:6 │ 1,0 │ 1,1 │",
        "    └─────┴─────┘",
    ]
    found = inspect(x)
    assert found.title == (
        f"GlobalTensor (6, 4) of float32 on {mesh}, data: Shard(dim=0), model: Shard(dim=1)"
    )
    last = found.parts[-1]
    assert (dict(last.point), last.shape, last.start, last.nbytes) == (
        {"data": 1, "model": 1},
        (3, 2),
        (3, 2),
        24,
    )
    assert (last.low, last.mean, last.high, last.odd, last.failed) == (14.0, 18.5, 23.0, 0, None)


def test_copies_are_in_one_field(mesh: Mesh) -> None:
    by_columns = distribute(torch.zeros(3, 4), mesh, [None, "data"])
    assert picture(by_columns)[3] == "0:3 │ 0,0 0,1 │ 1,0 1,1 │"
    everywhere = distribute(torch.zeros(5), mesh)
    assert picture(everywhere) == [
        "dimension 0 goes down",
        "    ┌─────────────────┐",
        "0:5 │ 0,0 0,1 1,0 1,1 │",
        "    └─────────────────┘",
    ]


def test_parts_of_other_sizes_and_none_at_all_are_drawn(mesh: Mesh) -> None:
    uneven = distribute(torch.zeros(3), mesh, [("data", "model")])
    assert [(part.start, part.shape) for part in inspect(uneven).parts] == [
        ((0,), (1,)),
        ((1,), (1,)),
        ((2,), (1,)),
        ((3,), (0,)),
    ]
    assert picture(uneven)[-2] == "3:3 │ 1,1 │"


def test_tensors_without_a_picture_still_have_a_table(mesh: Mesh) -> None:
    assert picture(distribute(torch.tensor(7.0), mesh)) == []
    assert len(inspect(distribute(torch.tensor(7.0), mesh)).parts) == 4


def test_each_process_has_its_own_numbers(procs: ProcMesh) -> None:
    rank = rank_tensor(procs, "gpus").double()
    first, second = inspect(rank / rank).parts
    assert (first.low, first.odd) == (None, 1)
    assert (second.low, second.mean, second.high, second.odd) == (1.0, 1.0, 1.0, 0)
    lines = str(inspect(rank + 0.25)).splitlines()
    assert lines[1].split() == ["process", "shape", "bytes", "least", "mean", "greatest", "not", "finite"]
    assert lines[2:] == [
        "gpus=0   ()     8      0.25   0.25  0.25      0",
        "gpus=1   ()     8      1.25   1.25  1.25      0",
    ]


def test_numbers_are_those_of_all_values(procs: ProcMesh) -> None:
    many = share(torch.arange(3_000_000, dtype=torch.int32), procs)
    part = inspect(many).parts[0]
    assert (part.low, part.mean, part.high, part.nbytes) == (0.0, 1_499_999.5, 2_999_999.0, 12_000_000)
    part = inspect(share(torch.zeros(2, dtype=torch.complex64), procs)).parts[0]
    assert (part.low, part.mean, part.high, part.odd) == (None, None, None, 0)


@remote(propagate=lambda x: x)
def picky(x: Any) -> Any:
    if x.item() == 1:
        raise ValueError("not <this> one")
    return x


def test_a_process_that_has_failed_says_why_and_the_others_show_theirs(procs: ProcMesh) -> None:
    found = inspect(picky(rank_tensor(procs, "gpus")))
    assert [part.failed for part in found.parts] == [None, "picky failed: ValueError: not <this> one"]
    assert str(found).splitlines()[-1] == "gpus=1   picky failed: ValueError: not <this> one"
    assert "not &lt;this&gt; one</td>" in found._repr_html_()


def test_show_prints_the_values_of_one_process(procs: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    show(rank_tensor(procs, "gpus") * 10, gpus=1)
    assert capsys.readouterr().out == f"MeshTensor () of int64 on {procs}, at gpus=1:\ntensor(10)\n"


def test_a_tensor_of_this_process_is_refused() -> None:
    with pytest.raises(TypeError, match="not a tensor of a mesh"):
        inspect(torch.ones(1))
