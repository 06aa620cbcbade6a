"""A small transformer, trained data-parallel and tensor-parallel from one script; its losses are those of one process.

    python examples/global_transformer.py

It needs PyTorch, and runs on a laptop: four processes of this machine in two dimensions.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from mesh_tensor import ColumnParallel, FullyShard, Mesh, RowParallel, distribute, fetch, module_to_mesh

WORDS, PLACES, FEATURES, HEADS = 32, 8, 16, 4


class Block(nn.Module):
    """Attention, and a layer of features for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
        self.query, self.key, self.value = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.out = nn.Linear(FEATURES, FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """Add what this block has found."""
        normed = self.norm(x)
        parts = (self.query(normed), self.key(normed), self.value(normed))
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: Tensor = self.down(functional.gelu(self.up(self.second_norm(x))))
        return x + found


def transformer() -> nn.Module:
    """Make a model: nothing in it knows of a mesh."""
    return nn.Sequential(
        nn.Embedding(WORDS, FEATURES),
        Block(),
        Block(),
        nn.LayerNorm(FEATURES),
        nn.Linear(FEATURES, WORDS),
    )


def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Train: nothing in here knows of a mesh either."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        guess = model(batch[:, :-1])
        loss = functional.cross_entropy(guess.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


PLAN = {
    "*": FullyShard("data_parallel"),
    "*.query": ColumnParallel("model_parallel"),
    "*.key": ColumnParallel("model_parallel"),
    "*.value": ColumnParallel("model_parallel"),
    "*.out": RowParallel("model_parallel"),
    "*.up": ColumnParallel("model_parallel"),
    "*.down": RowParallel("model_parallel"),
}


def main() -> None:
    """Train twice, here and on a mesh."""
    torch.manual_seed(0)
    model = transformer()
    batches = [torch.randint(0, WORDS, (8, 1)) + torch.arange(PLACES + 1) for _ in range(10)]
    batches = [batch % WORDS for batch in batches]
    alone = [loss.item() for loss in train(copy.deepcopy(model), batches)]

    with Mesh(shape=(2, 2), mesh_dim_names=("data_parallel", "model_parallel")) as mesh:
        model = module_to_mesh(model, mesh, PLAN)
        losses = train(model, [distribute(batch, mesh, ["data_parallel", None]) for batch in batches])
        for step, (loss, other) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}: {fetch(loss).item():.4f} on the mesh, {other:.4f} in one process")
            assert abs(fetch(loss).item() - other) < 1e-4


if __name__ == "__main__":
    main()
