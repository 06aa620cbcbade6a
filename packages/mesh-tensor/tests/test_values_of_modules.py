"""Where the values of a module on a mesh come from, and go to: from `meta`, from ordinary tensors, to files of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mesh_tensor import FullyShard, Mesh, distribute, fetch, fetch_shard, module_to_mesh, share  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2,), ("data",), procs) as mesh:
        yield mesh


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.linear(x) * self.scale
        return scaled


class Reset(Scaled):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 3.0)


class Forgetful(Scaled):
    def reset_parameters(self) -> None:
        """Set nothing."""


def test_a_module_from_meta_has_values_on_its_processes(mesh: Mesh) -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(10, 4, padding_idx=0), Reset(), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2)
        )
    torch.manual_seed(1)
    model = module_to_mesh(model, mesh, {"*": FullyShard("data")})
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))
    weight = model[1].linear.weight
    assert fetch_shard(weight.detach(), data=1).shape == (2, 4)
    assert 0 < float(fetch(weight.detach()).abs().max()) <= 0.5
    assert fetch(model[1].scale.detach()).equal(torch.full((4,), 3.0))
    assert not fetch(model[0].weight.detach())[0].any()
    assert fetch(model[2].running_var).equal(torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = fetch(weight.detach())
    model[2](
        model[1](model[0](distribute(torch.tensor([1, 2, 3, 4]), mesh, ["data"])))
    ).square().sum().backward()
    optimizer.step()
    assert not fetch(weight.detach()).equal(before)


def test_a_module_from_meta_that_nobody_gives_values_is_refused(mesh: Mesh) -> None:
    with torch.device("meta"):
        without, forgetful = nn.Sequential(Scaled()), Forgetful()
    with pytest.raises(
        ValueError, match=r"0\.scale is on the device 'meta', and Scaled has no reset_parameters\(\)"
    ):
        module_to_mesh(without, mesh)
    with pytest.raises(
        ValueError, match=r"scale was on .*'meta', and Forgetful\.reset_parameters\(\) has left it without"
    ):
        module_to_mesh(forgetful, mesh)


def test_load_state_dict_takes_ordinary_tensors(mesh: Mesh) -> None:
    source = nn.Linear(600, 600)
    assert source.weight.nbytes > 1 << 20
    model = module_to_mesh(nn.Linear(600, 600), mesh, {"*": FullyShard("data")})
    model.load_state_dict(source.state_dict())
    assert fetch(model.weight.detach()).equal(source.weight)
    assert fetch_shard(model.weight.detach(), data=1).equal(source.weight[300:])


def test_what_reads_memory_is_told_how_to_write_a_file(mesh: Mesh, procs: ProcMesh) -> None:
    for tensor in (distribute(torch.ones(3), mesh), share(torch.ones(3), procs)):
        with pytest.raises(
            TypeError, match=r"no memory in this process: fetch\(\) it.*export_safetensors\(\)"
        ):
            tensor.data_ptr()
