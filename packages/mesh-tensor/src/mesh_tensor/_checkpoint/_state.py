"""A state as names and values: nested dicts and lists, modules and optimizers in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

Path = tuple[Any, ...]


def opened(state: Any) -> Any:
    """Return the state, with that of each module and optimizer in their place."""
    if isinstance(state, nn.Module):
        # The parameters themselves: their earlier values may be gone with a process.
        return state.state_dict(keep_vars=True)
    if callable(getattr(state, "state_dict", None)):
        return state.state_dict()
    if isinstance(state, Mapping):
        return {key: opened(value) for key, value in state.items()}
    return state


def flat(state: Any) -> dict[str, tuple[Path, Any]]:
    """Return the values by their names, as in PyTorch's checkpoints, and the path of each."""
    found: dict[str, tuple[Path, Any]] = {}
    for path, value in _leaves((), state):
        name = ".".join(map(str, path))
        if name in found:
            raise ValueError(f"two values of the state have the name {name!r}: rename a key")
        found[name] = path, value
    return found


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves((*path, key), each)
    elif isinstance(value, list) and _has_more(value):
        for place, each in enumerate(value):
            yield from _leaves((*path, place), each)
    else:
        yield path, value


def _has_more(values: list[Any]) -> bool:
    return any(
        isinstance(each, (Mapping, torch.Tensor)) or (isinstance(each, list) and _has_more(each))
        for each in values
    )


def put(state: Any, path: Path, value: Any) -> None:
    """Put a value into the state."""
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value
