"""Code that workers cannot import: classes and functions of scripts, notebooks, lambdas."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_core import Actor, ProcMesh, endpoint

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python, pytest.mark.versions]


def lines(script: Any, source: str) -> list[str]:
    run = script(source)
    out, err = run.finish()
    assert run.process.returncode == 0, err
    return list(out.splitlines())


def test_an_actor_of_a_script(script: Any) -> None:
    assert lines(
        script,
        """
        from dataclasses import dataclass
        from enum import Enum
        from mesh_core import Actor, endpoint, this_host

        SCALE = 10

        class Colour(Enum):
            RED = 1

        @dataclass
        class Batch:
            n: int
            colour: Colour = Colour.RED

            def doubled(self):
                return Batch(self.n * 2)

        def helper(n):
            return n * SCALE

        class Base(Actor):
            @endpoint
            def base(self):
                return type(self).__name__

        class Trainer(Base):
            def __init__(self, batch):
                self.batch = batch

            @endpoint
            def step(self, batch):
                assert isinstance(batch, Batch) and batch.colour is Colour.RED
                return batch.doubled()

            @endpoint
            async def help(self, n):
                return helper(n)

            @endpoint
            def own(self):
                return self.batch

        if __name__ == "__main__":
            with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
                trainers = procs.spawn("trainers", Trainer, Batch(1))
                for batch in trainers.step.call(Batch(4)).get().values():
                    print(type(batch) is Batch, batch)
                print(trainers.help.call(7).get().values(), trainers.base.call().get().values())
                print(trainers.own.call().get().get(1) == Batch(1))
        """,
    ) == ["True Batch(n=8, colour=<Colour.RED: 1>)"] * 2 + ["[70, 70] ['Trainer', 'Trainer']", "True"]


def test_an_exception_class_of_a_script(script: Any) -> None:
    assert lines(
        script,
        """
        from mesh_core import Actor, ActorError, endpoint, this_host

        class OutOfPaper(Exception):
            def __init__(self, tray, *, left):
                super().__init__(f"tray {tray}")
                self.tray = tray
                self.left = left

        class Printer(Actor):
            @endpoint
            def print(self):
                raise OutOfPaper(2, left=0)

        if __name__ == "__main__":
            with this_host().spawn_procs() as procs:
                try:
                    procs.spawn("printer", Printer).print.call_one().get()
                except OutOfPaper as error:
                    print(isinstance(error, ActorError), error.tray, error.left)
        """,
    ) == ["True 2 0"]


def test_a_script_without_a_main_guard_does_not_spawn_forever(script: Any) -> None:
    assert lines(
        script,
        """
        from mesh_core import Actor, endpoint, this_host

        class Echo(Actor):
            @endpoint
            def echo(self, x):
                return x

        print("once")
        for start in ("fork", "exec"):
            with this_host().spawn_procs(start=start) as procs:
                print(procs.spawn("echo", Echo).echo.call_one(start).get())
        """,
    ) == ["once", "fork", "exec"]


def test_a_notebook(script: Any) -> None:
    """Cells are executed one after the other in one namespace, and a cell may redefine a class."""
    assert lines(
        script,
        '''
        import sys, textwrap, types

        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        cells = [
            """
            from mesh_core import Actor, endpoint, this_host
            procs = this_host().spawn_procs(per_host={"gpus": 2})
            """,
            """
            class Echo(Actor):
                @endpoint
                def echo(self, x):
                    return ("first", x)
            """,
            """
            echo = procs.spawn("echo", Echo)
            print(echo.echo.call(1).get().values())
            """,
            """
            FACTOR = 3
            class Echo(Actor):
                @endpoint
                def echo(self, x):
                    return ("second", x * FACTOR)
            """,
            """
            again = procs.spawn("again", Echo)
            print(again.echo.call(1).get().values())
            """,
            "print(echo.echo.call(1).get().values())",
            "procs.stop().get()",
        ]
        for n, cell in enumerate(cells):
            exec(compile(textwrap.dedent(cell), f"<cell {n}>", "exec"), main.__dict__)
        ''',
    ) == ["[('first', 1), ('first', 1)]", "[('second', 3), ('second', 3)]", "[('first', 1), ('first', 1)]"]


def test_python_dash_c() -> None:
    import subprocess
    import sys

    source = (
        "from mesh_core import *\n"
        "class A(Actor):\n"
        "    @endpoint\n"
        "    def f(self): return 42\n"
        "with this_host().spawn_procs() as procs: print(procs.spawn('a', A).f.call_one().get())\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_lambdas_and_closures_can_be_sent(echo: Any) -> None:
    offset = 5
    assert echo.call.call(lambda n: n + offset, 1).get().values() == [6] * 4

    def recursive(n: int) -> int:
        return 1 if n < 2 else n * recursive(n - 1)

    assert echo.slice(hosts=0, gpus=0).call.call_one(recursive, 5).get() == 120
    doubled = echo.slice(hosts=0, gpus=0).echo.call_one(lambda n: n * 2).get()
    assert doubled(4) == 8


def test_a_local_class_keeps_its_identity(procs: ProcMesh, echo: Any) -> None:
    class Local:
        def __init__(self, n: int) -> None:
            self.n = n

    back = echo.echo.call(Local(3)).get().values()
    assert all(type(value) is Local and value.n == 3 for value in back)


def test_a_local_actor_class_with_a_closure(procs: ProcMesh) -> None:
    greeting = "hello"

    class Greeter(Actor):
        @endpoint
        def greet(self, name: str) -> str:
            return f"{greeting} {name}"

    mesh = procs.spawn("greeters", Greeter)
    assert mesh.greet.call("you").get().values() == ["hello you"] * 4
    mesh.stop().get()
