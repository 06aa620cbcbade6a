"""Operators that PyTorch has for CPUs alone, for other devices.

A script's tensors are the CPU's to PyTorch there, wherever the processes have their values, so that its functions choose the CPU's kernels:
of attention, one that no other device has. Processes that use a device have these instead, made of operators that every device has.
"""

from __future__ import annotations

from typing import Any

import torch

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def offer(kind: str) -> Any:
    """Let PyTorch find them for that kind of device, for as long as the result is kept."""
    try:
        key = torch._C._dispatch_key_for_device(kind)  # noqa: SLF001 - nothing public tells
    except RuntimeError:
        return None  # No device of PyTorch's: nothing is computed there.
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in ((_FORWARD, attention), (_BACKWARD, attention_backward)):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):  # noqa: SLF001 - likewise
            library.impl(name, function, key)
    return library


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(dropout_p)
    wide = _wide(query)
    scores = _scores(query.to(wide), _spread(key, query).to(wide), is_causal, attn_mask, scale)
    total = scores.logsumexp(-1)
    seen = _weights(scores, total) @ _spread(value, query).to(wide)
    shape = (*query.shape[:-1], value.shape[-1])
    out = torch.empty_like(query) if query.shape == shape else _laid_out(query.new_empty(shape))
    return out.copy_(seen), _laid_out(total)


def attention_backward(  # noqa: PLR0917 - as PyTorch calls it
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(dropout_p)
    wide = _wide(query)
    grad, asked = grad_out.to(wide), query.to(wide)
    keys, values = (_spread(each, query).to(wide) for each in (key, value))
    weights = _weights(_scores(asked, keys, is_causal, attn_mask, scale), logsumexp.to(wide))
    of_weights = grad @ values.transpose(-2, -1)
    of_scores = weights * (of_weights - (grad * out.to(wide)).sum(-1, keepdim=True))
    of_scores = of_scores * _scale(query, scale)
    found = (of_scores @ keys, of_scores.transpose(-2, -1) @ asked, weights.transpose(-2, -1) @ grad)
    return tuple(  # type: ignore[return-value]
        _laid_out(_joined(each, given).to(given.dtype))
        for each, given in zip(found, (query, key, value), strict=True)
    )


def _check(dropout_p: float) -> None:
    if dropout_p:
        raise RuntimeError(
            f"attention with dropout is not computed so, as PyTorch's kernel for CPUs has none, got {dropout_p}"
        )


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return scale if scale is not None else query.shape[-1] ** -0.5


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1) * _scale(query, scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return scores


def _weights(scores: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    # A row in which nothing may be seen has no weights.
    hidden = total == float("-inf")
    return (scores - total.masked_fill(hidden, 0.0).unsqueeze(-1)).exp()


def _spread(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat the heads of keys, of which several of the query's share one."""
    times = query.shape[1] // max(1, tensor.shape[1])
    return tensor if times <= 1 else tensor.repeat_interleave(times, dim=1)


def _joined(grad: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    if grad.shape[1] == given.shape[1]:
        return grad
    return grad.view(grad.shape[0], given.shape[1], -1, *grad.shape[2:]).sum(2)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Lay it out as the CPU's kernel does: heads behind the places in the sequence."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
