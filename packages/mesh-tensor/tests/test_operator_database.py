"""PyTorch's own samples of its operators: a tenth of them, by seed, or all with `./dev test --all`."""

from __future__ import annotations

import os
import random

import pytest

from mesh_core import ProcMesh

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's database of operators needs expecttest")

from operator_database import check, operators

pytestmark = [pytest.mark.beside, pytest.mark.slow]

KNOWN = {
    "as_strided_partial_views": "what lies beside a view in its memory is not shared with it",
    "sparse_mm_reduce": "sparse tensors have no strides",
    "sparse_sampled_addmm": "sparse tensors have no strides",
    "tensor_split": "it reads a tensor of indices where it is called",
}
EVERYTHING = operators()
CHOSEN = (
    EVERYTHING
    if os.environ.get("MESH_TEST_ALL")
    else random.Random(13).sample(EVERYTHING, len(EVERYTHING) // 10)
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("operator", CHOSEN, ids=lambda each: each.formatted_name)
def test_an_operator_gives_what_it_gives_here(operator: object, procs: ProcMesh) -> None:
    name = operator.formatted_name  # type: ignore[attr-defined]
    if name in KNOWN:
        pytest.xfail(KNOWN[name])
    assert check(operator, procs) is None
