"""What an editor knows: types of endpoints, calls and results, as mypy sees them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from core_typing import mypy

pytest.importorskip("mypy", reason="mypy is not installed")

pytestmark = [pytest.mark.slow]

SOURCE = """
from typing import Any, Generic, TypeVar
from mesh_core import Actor, ActorMesh, Future, ProcMesh, ValueMesh, endpoint, this_host

class Trainer(Actor):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    @endpoint
    def step(self, batch: int, *, scale: float = 1.0) -> float:
        return batch * scale

    @endpoint
    async def loss(self, name: str) -> list[int]:
        return [1]

    @endpoint(concurrent=True)
    async def serve(self, question: bytes) -> str:
        return "answer"

    @endpoint
    def nothing(self) -> None: ...

T = TypeVar("T")

class Box(Actor, Generic[T]):
    def __init__(self, held: T) -> None: ...
    @endpoint
    def get(self) -> T: raise NotImplementedError

def train(trainers: ActorMesh[Trainer]) -> ValueMesh[float]:
    return trainers.step.call(1).get()

async def main(procs: ProcMesh) -> None:
    trainers = procs.spawn("trainers", Trainer, 1e-3)
    mesh: ActorMesh[Trainer] = trainers
"""


def check(tmp_path: Path, body: str, *options: str) -> list[str]:
    """Mypy's findings in `body`, appended to `main` above."""
    path = tmp_path / "program.py"
    path.write_text(SOURCE + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n")
    return [
        re.sub(r"^.*?program\.py:\d+: ", "", line) for line in mypy(path, *options) if "program.py" in line
    ]


def test_what_an_editor_completes(tmp_path: Path) -> None:
    found = check(
        tmp_path,
        """
        reveal_type(trainers)
        reveal_type(trainers.step.call)
        reveal_type(trainers.step.call(3))
        reveal_type(trainers.step.call(3).get())
        reveal_type(trainers.step.call(3).get(return_exceptions=True))
        reveal_type(trainers.step.call_one(3, scale=2.0).get(timeout=3))
        reveal_type(trainers.step.choose(3).get())
        reveal_type(trainers.step.broadcast(3))
        reveal_type(await trainers.loss.call_one("x"))
        reveal_type((await trainers.loss.call("x")).values())
        reveal_type(trainers.serve.call_one(b"x").get())
        reveal_type([future.get() for future in trainers.step.stream(1)])
        reveal_type([await future async for future in trainers.loss.stream("x")])
        reveal_type(trainers.slice(gpus=0).step.with_options(timeout=1.0).call_one(1).get())
        reveal_type(trainers.step.call_one(1).then(str).get())
        reveal_type(trainers.step.call_one(1).as_asyncio())
        reveal_type([value for _, value in trainers.step.call(1).get()])
        reveal_type(trainers.step.call(1).get().item(gpus=0))
        reveal_type(trainers.step.call(1).get().map(str))
        reveal_type(mesh.step.call_one(1).get())
        reveal_type([part.step.call_one(1).get() for _, part in mesh.slice(gpus=0)])
        reveal_type(train(trainers))
        reveal_type(train(mesh))
        reveal_type(procs.spawn("box", Box[int], 1).get.call_one().get())
        reveal_type(procs.spawn("trainers", Trainer, lr=1.0, supervise=None))
        reveal_type(await procs.spawn("trainers", Trainer, 1.0))
        reveal_type(trainers.sizes)
        reveal_type(this_host().spawn_procs(per_host={"gpus": 2}).slice(gpus=0))
        """,
    )
    told = [re.sub(r'note: Revealed type is "(.*)"', r"\1", line) for line in found]
    told = [
        re.sub(r"\b(builtins|mesh_core(?:\._?[a-z]\w*)+|asyncio\.futures|_asyncio|program)\.", "", line)
        for line in told
    ]
    assert told == [
        "Trainer",
        "def (batch: int, *, scale: float =) -> ManyFuture[float]",
        "ManyFuture[float]",
        "ValueMesh[float]",
        "ValueMesh[float | BaseException]",
        "float",
        "float",
        "Sending",
        "list[int]",
        "list[list[int]]",
        "str",
        "list[float]",
        "list[list[int]]",
        "float",
        "str",
        "Future[float]",
        "list[float]",
        "float",
        "ValueMesh[str]",
        "float",
        "list[float]",
        "ValueMesh[float]",
        "ValueMesh[float]",
        "int",
        "Trainer",
        "Trainer",
        "dict[str, int]",
        "ProcMesh",
    ]


@pytest.mark.full
def test_what_an_editor_reports_as_errors(tmp_path: Path) -> None:
    found = check(
        tmp_path,
        """
        trainers.step.call("three")
        trainers.step.call(3, scael=1.0)
        trainers.step.call_one()
        trainers.loss.broadcast(1)
        trainers.stepp.call(3)
        n: int = trainers.loss.call_one("x").get()
        procs.spawn("trainers", Trainer, "fast")
        procs.spawn("trainers", Trainer)
        procs.spawn("trainers", Trainer, 1.0, rate=2)
        procs.spawn("box", Box[int], "text")
        trainers[0]
        """,
    )
    codes = [re.search(r"\[([\w-]+)\]$", line) for line in found if line.startswith("error")]
    assert [code.group(1) for code in codes if code] == [
        "arg-type",
        "call-arg",
        "call-arg",
        "arg-type",
        "attr-defined",
        "assignment",
        "call-overload",
        "call-overload",
        "call-arg",
        "call-overload",
        "index",
    ]


@pytest.mark.full
def test_the_plugin_reports_constructor_arguments_in_the_constructors_words(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nplugins = mesh_core.mypy\n")
    found = check(
        tmp_path,
        """
        procs.spawn("trainers", Trainer, "fast")
        procs.spawn("trainers", Trainer, lr="fast")
        procs.spawn("trainers", Trainer)
        procs.spawn("trainers", Trainer, 1.0, 2.0)
        procs.spawn("trainers", Trainer, 1.0, rate=2)
        procs.spawn(cls=Trainer, lr="fast", name="trainers")
        procs.spawn("trainers", Trainer, "fast", supervise=lambda failure: True)
        procs.spawn("box", Box[int], "text")
        reveal_type(procs.spawn("trainers", Trainer, "fast"))
        reveal_type(procs.spawn("trainers", Trainer, 1.0))
        reveal_type(procs.spawn("trainers", Trainer, lr=1.0, supervise=None))
        reveal_type(procs.spawn("box", Box[int], 1))
        """,
        f"--config-file={config}",
    )
    wrong = 'error: Argument "lr" to "Trainer" has incompatible type "str"; expected "float"  [arg-type]'
    assert [line for line in found if not line.startswith("note: ")] == [
        wrong,
        wrong,
        'error: Missing positional argument "lr" in call to "Trainer"  [call-arg]',
        'error: Too many arguments for "Trainer"  [call-arg]',
        'error: Unexpected keyword argument "rate" for "Trainer"  [call-arg]',
        wrong,
        wrong,
        'error: Argument "held" to "Box" has incompatible type "str"; expected "int"  [arg-type]',
        wrong,
    ]
    revealed = re.findall(r'Revealed type is "program\.(.*?)"', "\n".join(found))
    assert revealed == ["Trainer", "Trainer", "Trainer", "Box[int]"]


def test_the_plugin_imports_mypy_only_for_mypy() -> None:
    code = "import sys, mesh_core.mypy; print([name for name in sys.modules if name.split('.')[0] == 'mypy'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
