"""Memory of results is used again once nothing uses it (SPR-1)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mesh_tensor._spares import LEAST, MOST, Spares  # noqa: E402

CPU = torch.device("cpu")
NUMBERS = LEAST // 4


def test_memory_is_given_out_again_when_no_view_of_it_is_left() -> None:
    spares = Spares()
    first = spares.empty((2, NUMBERS // 2), torch.float32, CPU)
    place = first.data_ptr()
    part = first[1].t()
    second = spares.empty((NUMBERS,), torch.float32, CPU)
    assert second.data_ptr() != place
    del first
    assert spares.empty((NUMBERS,), torch.float32, CPU).data_ptr() != place
    part.fill_(3)
    del part
    again = spares.empty((NUMBERS,), torch.float32, CPU)
    assert again.data_ptr() == place
    # Of another type it is other memory.
    del again
    assert spares.empty((NUMBERS,), torch.int32, CPU).data_ptr() != place


def test_what_was_resized_is_not_given_out() -> None:
    spares = Spares()
    first = spares.empty((NUMBERS,), torch.float32, CPU)
    first.untyped_storage().resize_(0)
    del first
    assert spares.empty((NUMBERS,), torch.float32, CPU).fill_(1).sum().item() == NUMBERS


def test_memory_is_kept_from_one_mebibyte_to_the_most() -> None:
    assert (LEAST, MOST) == (1 << 20, 256 << 20)
    for size, kept in ((LEAST - 1, 0), (LEAST, 1), (MOST, 1), (MOST + 1, 0)):
        spares = Spares()
        spares.empty((size,), torch.uint8, CPU)
        assert len(spares._kept) == kept  # noqa: SLF001 - nothing else tells


def test_no_more_is_kept_than_is_allowed() -> None:
    spares = Spares()
    for count in range(1, 5):
        spares.empty((MOST // 4 - count,), torch.uint8, CPU)
        spares.empty((MOST // 4 + count,), torch.uint8, CPU)
    assert sum(each.nbytes for each in spares._kept) <= MOST  # noqa: SLF001 - nothing else tells
    small = spares.empty((3,), torch.float32, CPU)
    large = spares.empty((MOST + 1,), torch.uint8, CPU)
    assert not any(each.data_ptr() in (small.data_ptr(), large.data_ptr()) for each in spares._kept)  # noqa: SLF001 - likewise
