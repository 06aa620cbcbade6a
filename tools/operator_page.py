"""The page of a run of PyTorch's database of operators: how many gave the same, and what became of each other one."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from itertools import groupby

import torch

CAUSES: dict[str, str] = {
    "as_strided_partial_views": "what lies beside a view in its memory is not shared with it; on CPUs as well",
    "cov": "rounding: weights that nearly cancel, in single precision even where the rest is double; the same difference on CPUs",
    "native_layer_norm": "rounding: equal in double precision; PyTorch makes it of other operators than on CPUs",
    "nn_functional_batch_norm": "without training, the kernel of CPUs, which this device uses, saves nothing, and PyTorch expects of other "
    "devices that they save statistics, as CUDA does",
    "sparse_mm_reduce": "sparse tensors have no strides; on CPUs as well",
    "sparse_sampled_addmm": "sparse tensors have no strides; on CPUs as well",
    "tensor_split": "it reads a tensor of indices where it is called; on CPUs as well",
    "to_sparse": "the late device has no sparse tensors",
}
"""Why operators differ from one process's on the late device, where that was looked into."""
_ROUNDING = "sums over processes, and over what is left of a dimension, are rounded in another order"


def page(said: Mapping[str, Mapping[str, str | None]], command: str, device: str) -> str:
    """Return the page: `said` has by operator, and by number of processes, what went wrong."""
    day = datetime.datetime.now(tz=datetime.UTC).date()
    lines = [
        f"# {day}, PyTorch's database of operators on the device `{device}`",
        "",
        f"`{command}` on {day}, PyTorch {torch.__version__}. {len(said)} operators; of each, results and gradients are compared with those of one process.",
        "",
        "| processes | operators | same | the same but for rounding | refused | different |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    counts = sorted({count for each in said.values() for count in each}, key=int)
    others: list[tuple[str, str, str]] = []
    for count in counts:
        kinds = [_kind(name, each[count]) for name, each in said.items()]
        row = [kinds.count(kind) for kind in ("same", "rounding", "refused", "different")]
        same = f"{row[0]}, **{100 * row[0] / max(1, len(said)):.1f} %**"
        lines.append(f"| {count} | {len(said)} | {same} | {row[1]} | {row[2]} | {row[3]} |")
        others += [
            (_kind(name, each[count]), name, f"{CAUSES.get(name, _short(each[count] or ''))}")
            for name, each in said.items()
            if each[count] is not None
        ]
    for kind, rows in groupby(sorted(set(others)), key=lambda each: each[0]):
        lines += ["", f"## {kind.capitalize()}", "", "| operator | why |", "| --- | --- |"]
        lines += [f"| `{name}` | {why} |" for _, name, why in rows]
    return "\n".join([*lines, ""])


def _kind(name: str, what: str | None) -> str:
    if what is None:
        return "same"
    if what.startswith("Rounding") or CAUSES.get(name, "").startswith("rounding"):
        return "rounding"
    return "different" if what.startswith("SomethingElse") else "refused"


def _short(what: str) -> str:
    """Return a message that fits in a table."""
    if what.startswith("Rounding"):
        return _ROUNDING
    return re.sub(r"\s+", " ", what).replace("|", "\\|")[:160]
