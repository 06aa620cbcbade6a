"""Attention for devices that lack the CPU's kernel, beside that kernel: values, gradients and how they lie in memory."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mesh_tensor import _portable as portable  # noqa: E402

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # noqa: SLF001 - the only name
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default  # noqa: SLF001 - likewise


def drawn(heads: int, places: int, dtype: Any, *, behind: bool) -> Any:
    shape = (2, places, heads, 8) if behind else (2, heads, places, 8)
    made = torch.randn(shape, dtype=dtype)
    return made.transpose(1, 2) if behind else made


@pytest.mark.parametrize("behind", [False, True], ids=["heads first", "heads behind places"])
@pytest.mark.parametrize("how", ["plain", "causal", "masked", "fewer heads", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_it_is_the_cpus(dtype: Any, how: str, behind: bool) -> None:
    torch.manual_seed(0)
    query = drawn(4, 7, dtype, behind=behind)
    key, value = (drawn(2 if how == "fewer heads" else 4, 9, dtype, behind=behind) for _ in range(2))
    mask = torch.randn(2, 1, 7, 9).to(dtype) if how == "masked" else None
    scale = 0.3 if how == "scaled" else None
    causal = how == "causal"
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}

    out, total = FORWARD(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    grad = torch.randn_like(out)
    want = [out, total]
    want += BACKWARD(grad, query, key, value, out, total, 0.0, causal, attn_mask=mask, scale=scale)
    got = [*portable.attention(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)]
    got += portable.attention_backward(
        grad, query, key, value, out, total, 0.0, causal, attn_mask=mask, scale=scale
    )
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **near)
        assert one.stride() == other.stride()


def test_rows_that_see_nothing_have_no_weights() -> None:
    x = torch.randn(1, 1, 2, 4)
    mask = torch.tensor([[0.0, 0.0], [float("-inf"), float("-inf")]])
    out, total = portable.attention(x, x, x, attn_mask=mask)
    assert out[0, 0, 1].tolist() == [0.0] * 4
    grads = portable.attention_backward(torch.ones_like(x), x, x, x, out, total, 0.0, False, attn_mask=mask)
    assert all(each.isfinite().all() for each in grads)


def test_dropout_is_refused_as_by_the_cpu() -> None:
    x = torch.randn(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="dropout"):
        portable.attention(x, x, x, 0.5)


def test_a_device_that_pytorch_does_not_know_gets_nothing() -> None:
    assert portable.offer("noted") is None
