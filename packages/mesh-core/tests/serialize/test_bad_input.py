"""Bad input: a clear error at the caller, quickly, with nothing hung, leaked or killed unnecessarily."""

from __future__ import annotations

import abc
import inspect
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from core_samples import Broken, BrokenAsync, Echo, Mixed, Unpicklable, make_lock, raise_unpicklable

from mesh_core import (
    Actor,
    ActorError,
    Endpoint,
    MeshError,
    ProcMesh,
    SerializationError,
    SpawnError,
    SupervisionError,
    Undeliverable,
    endpoint,
    this_host,
)

T = TypeVar("T")

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def one(echo: Any) -> Any:
    """An actor that must still answer after each test."""
    mesh = echo.slice(hosts=0, gpus=0)
    yield mesh
    assert mesh.echo.call_one("still here").get() == "still here"


# Mistakes carried over from other libraries.


def test_a_mesh_is_not_indexed_by_number(echo: Any, procs: ProcMesh) -> None:
    for mesh in (echo, procs):
        with pytest.raises(TypeError, match=r"dimensions by name, such as slice\(hosts=0\).*hosts=2, gpus=2"):
            mesh.slice(0)
        with pytest.raises(TypeError, match=r"got \[0\].*Write mesh\.slice\(hosts=0\)"):
            mesh[0]
    values = echo.echo.call(1).get()
    with pytest.raises(TypeError, match=r"values\.get\(1\).*values\.item\(hosts=0, gpus=0\)"):
        values[1]
    assert values.get(1) == 1
    single = echo.slice(hosts=0, gpus=0)
    with pytest.raises(TypeError, match="the mesh itself"):
        single[0]
    with pytest.raises(TypeError, match="this mesh has none"):
        single.slice(0)


def test_a_field_of_a_mesh_is_not_assigned(echo: Any) -> None:
    with pytest.raises(
        AttributeError, match=r"cannot set 'rate' on <ActorMesh 'echo'.*give Echo an endpoint"
    ):
        echo.rate = 5
    assert "rate" not in vars(echo)


def test_invalid_endpoint_marks() -> None:
    with pytest.raises(TypeError, match=r"got the static method .*; remove @staticmethod"):

        class Static(Actor):
            @endpoint
            @staticmethod
            def f(n: int) -> int:
                return n

    for kind in (staticmethod, classmethod):
        with pytest.raises(TypeError, match=rf"is marked both @{kind.__name__} and @endpoint"):
            type("Wrapped", (Actor,), {"f": kind(endpoint(lambda self: 1))})
    for twice in (endpoint(concurrent=True), endpoint):
        with pytest.raises(TypeError, match="is marked @endpoint twice; keep one"):
            twice(endpoint(make_lock))
    with pytest.raises(TypeError, match="must mark a method, got int"):
        endpoint(concurrent=False)(3)  # type: ignore[call-overload]


class Abstract(Actor, abc.ABC):
    @abc.abstractmethod
    def step(self) -> int: ...

    @endpoint
    def run(self) -> int:
        return self.step()


class Concrete(Abstract):
    def step(self) -> int:
        return 7


def test_an_abstract_class_is_refused_where_it_is_spawned(procs: ProcMesh) -> None:
    with pytest.raises(
        TypeError, match="cannot spawn Abstract: it is abstract, without step; spawn a subclass"
    ):
        procs.spawn("abstract", Abstract)
    concrete = procs.slice(hosts=0, gpus=0).spawn("concrete", Concrete)
    assert concrete.run.call_one().get() == 7
    concrete.stop().get()


def test_levels_of_logging_by_name(procs: ProcMesh) -> None:
    procs.logging_option(level="WARNING")
    with pytest.raises(ValueError, match=r"level must be one of DEBUG, .*CRITICAL, or a number.*got 'warn'"):
        procs.logging_option(level="warn")
    procs.logging_option(level="INFO")


class Box(Actor, Generic[T]):
    def __init__(self, held: T) -> None:
        self.held = held

    @endpoint
    def get(self) -> T:
        """Return what it holds."""
        return self.held

    @endpoint
    def undocumented(self, n: int = 3) -> None: ...


def test_a_generic_class_with_its_parameters(procs: ProcMesh) -> None:
    box = procs.slice(hosts=0, gpus=0).spawn("box", Box[int], 5)
    assert box.get.call_one().get() == 5
    box.stop().get()


def test_an_endpoint_shows_the_users_own_docstring_and_signature(procs: ProcMesh) -> None:
    box = procs.slice(hosts=0, gpus=0).spawn("box", Box[int], 5)
    assert inspect.getdoc(box.get) == "Return what it holds."
    assert str(inspect.signature(box.undocumented)) == "(n: 'int' = 3) -> 'None'"
    assert "Endpoint undocumented(n=3) of Box" in (inspect.getdoc(box.undocumented) or "")
    # A reference from elsewhere, without the class, shows what it knows.
    reference = pickle.loads(pickle.dumps(box))
    assert "Endpoint get() of Box" in (inspect.getdoc(reference.get) or "")
    assert (inspect.getdoc(Endpoint) or "").startswith("An endpoint of some actors")
    assert "self" in inspect.signature(Endpoint.call).parameters
    box.stop().get()


# Arguments.


def test_an_argument_that_cannot_be_pickled(one: Any) -> None:
    lock = threading.Lock()
    for call in (one.echo.call, one.echo.call_one, one.echo.choose, one.echo.broadcast, one.echo.stream):
        with pytest.raises(SerializationError, match=r"cannot send args\[0\]\['lock'\]") as caught:
            call({"lock": lock})
        assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("mode", ["r", "rb", "w+", "ab"])
def test_an_open_file_is_refused_rather_than_copied(one: Any, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "data.txt"
    path.write_text("all that it says")
    with path.open(mode) as file, pytest.raises(SerializationError) as caught:
        one.echo.call_one({"file": file})
    assert f"cannot send args[0]['file']: cannot pickle an open file ({str(path)!r})" in str(caught.value)
    assert "Send its path" in str(caught.value)


def test_a_future_as_an_argument_says_to_wait_for_it(one: Any) -> None:
    future = one.echo.call_one(1)
    with pytest.raises(
        SerializationError, match=r"cannot send args\[0\]\[0\]: .*Wait for it first.*future.get\(\)"
    ):
        one.echo.call_one([future])
    with pytest.raises(SerializationError, match="Read it here"):
        one.echo.call_one(one.echo.stream(1))
    assert one.echo.call_one(future.get()).get() == 1


def test_a_constructors_argument_that_cannot_be_pickled(procs: ProcMesh) -> None:
    class Holder(Actor):
        def __init__(self, lock: Any) -> None: ...

        @endpoint
        def ping(self) -> None: ...

    with pytest.raises(SerializationError, match="cannot send"):
        procs.spawn("holder", Holder, threading.Lock())


def test_an_argument_that_cannot_be_rebuilt(one: Any) -> None:
    with pytest.raises(SerializationError, match="cannot rebuild a message") as caught:
        one.echo.call_one(Unreadable()).get()
    assert "not today" in str(caught.value)


class Unreadable:
    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise RuntimeError("not today")


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, r"Echo\.echo\(value\) missing required argument 'value'"),
        ((1, 2), {}, "takes at most 1 positional argument, got 2"),
        ((), {"valeu": 1}, "got unexpected argument 'valeu'"),
        ((1,), {"value": 1}, "got multiple values for argument 'value'"),
    ],
)
def test_a_wrong_signature(one: Any, args: Any, kwargs: Any, text: str) -> None:
    for call in (one.echo.call, one.echo.call_one, one.echo.choose, one.echo.broadcast, one.echo.stream):
        with pytest.raises(TypeError, match=text):
            call(*args, **kwargs)


def test_a_wrong_signature_with_all_kinds_of_parameters(one: Any) -> None:
    with pytest.raises(TypeError, match="missing required argument 'c'"):
        one.keywords.call_one(1)
    with pytest.raises(TypeError, match="missing required argument 'a'"):
        one.keywords.call_one(c=1)
    # The name of a positional-only parameter may be used as a keyword.
    assert one.keywords.call_one(1, c=3, a=4).get() == (1, 2, (), 3, {"a": 4})


def test_a_wrong_signature_of_a_constructor(procs: ProcMesh) -> None:
    for args, kwargs in (((), {}), ((1, 2), {}), ((), {"txt": 1})):
        with pytest.raises(TypeError, match=r"Broken\(text\)"):
            procs.spawn("broken", Broken, *args, **kwargs)
    with pytest.raises(TypeError, match=r"Echo\(\) takes no arguments"):
        procs.spawn("echo", Echo, 1)


def test_an_unknown_endpoint(one: Any) -> None:
    with pytest.raises(AttributeError, match="has no endpoint 'ecko'; did you mean 'echo'"):
        one.ecko.call_one(1)
    with pytest.raises(AttributeError, match=": call, echo, echo_async, fail, keywords"):
        one.zzz  # noqa: B018
    assert not hasattr(one, "__array__")


def test_an_endpoint_without_an_adverb(one: Any) -> None:
    with pytest.raises(TypeError, match=r"say how to call echo\.echo: \.call\(\.\.\.\)"):
        one.echo(1)


def test_call_one_on_many(echo: Any) -> None:
    with pytest.raises(ValueError, match=r"exactly one actor.*hosts=2, gpus=2.* has 4; slice it first"):
        echo.echo.call_one(1)


def test_an_out_of_range_slice(echo: Any) -> None:
    with pytest.raises(IndexError, match="gpus"):
        echo.slice(gpus=7)


@pytest.mark.parametrize("name", ["stop", "slice", "size", "initialized"])
def test_an_endpoint_named_like_a_method_of_every_mesh(name: str) -> None:
    with pytest.raises(TypeError, match=f"has an endpoint named '{name}', which would be hidden"):
        type("Clash", (Actor,), {name: endpoint(lambda self: None)})


def test_classes_that_are_not_actors(procs: ProcMesh) -> None:
    for wrong in (Actor, int, Echo(), lambda: None):
        with pytest.raises(TypeError, match="spawn\\(\\) must be given an actor class"):
            procs.spawn("wrong", wrong)


def test_only_coroutines_can_be_concurrent() -> None:
    with pytest.raises(TypeError, match="define it with 'async def'"):

        @endpoint(concurrent=True)
        def plain(self: Any) -> None: ...


@pytest.mark.parametrize(
    "env",
    [{"A=B": "x"}, {"": "x"}, {"A": 1}, {1: "x"}, {"A": "x\0y"}],
    ids=["equals", "empty", "int", "key", "nul"],
)
def test_an_invalid_environment(env: Any) -> None:
    with pytest.raises(ValueError, match="names and values must be strings"):
        this_host().spawn_procs(env=env)


# Actors that fail.


@pytest.mark.parametrize(
    ("cls", "args", "kind"),
    [(Broken, ("cannot be",), ValueError), (BrokenAsync, (), KeyError)],
    ids=["sync", "async"],
)
def test_a_constructor_that_raises(procs: ProcMesh, cls: Any, args: Any, kind: type[Exception]) -> None:
    mesh: Any = procs.spawn("broken", cls, *args)
    waiting = mesh.ping.call()
    with pytest.raises(kind) as caught:
        mesh.initialized.get()
    assert isinstance(caught.value, ActorError)
    assert caught.value.actor == "broken"
    assert "in __init__" in caught.value.remote_traceback
    # Earlier and later calls say why nobody answers.
    with pytest.raises(kind):
        waiting.get()
    with pytest.raises(kind):
        mesh.slice(hosts=1, gpus=1).ping.call_one().get()
    mesh.stop().get()
    assert procs.spawn("fine", Echo).echo.call(1).get().values() == [1] * 4


def test_a_constructor_that_exits(procs: ProcMesh) -> None:
    class Quits(Actor):
        def __init__(self) -> None:
            raise SystemExit(3)

        @endpoint
        def ping(self) -> None: ...

    mesh = procs.spawn("quits", Quits)
    with pytest.raises(ActorError, match="SystemExit"):
        mesh.initialized.get()
    mesh.stop().get()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_an_endpoint_that_raises_what_would_end_a_process(one: Any, kind: type[BaseException]) -> None:
    with pytest.raises(ActorError, match=kind.__name__) as caught:
        one.fail.call_one(kind("stop")).get()
    assert not isinstance(caught.value, kind)
    assert caught.value.cause_type is kind


def test_a_coroutine_that_raises_what_would_end_a_loop(procs: ProcMesh) -> None:
    class Ends(Actor):
        @endpoint
        async def end(self, kind: str) -> None:
            raise {"exit": SystemExit, "interrupt": KeyboardInterrupt}[kind]("stop")

        @endpoint
        async def ping(self) -> str:
            return "pong"

    mesh = procs.slice(hosts=0, gpus=0).spawn("ends", Ends)
    for kind in ("exit", "interrupt"):
        with pytest.raises(ActorError):
            mesh.end.call_one(kind).get()
        assert mesh.ping.call_one().get() == "pong"
    mesh.stop().get()


def test_an_exception_that_cannot_be_pickled(one: Any) -> None:
    with pytest.raises(ActorError, match="the lock comes along") as caught:
        one.call.call_one(raise_unpicklable).get()
    assert caught.value.cause_name == "core_samples.Unpicklable"
    assert "raise_unpicklable" in caught.value.remote_traceback
    assert isinstance(caught.value, (Unpicklable, ActorError))


def test_a_reply_that_cannot_be_pickled(one: Any) -> None:
    with pytest.raises(SerializationError, match="cannot send"):
        one.call.call_one(make_lock).get()


def test_a_reply_that_cannot_be_pickled_from_a_coroutine(procs: ProcMesh) -> None:
    class Locks(Actor):
        @endpoint
        async def lock(self) -> Any:
            return threading.Lock()

        @endpoint
        async def ping(self) -> str:
            return "pong"

    mesh = procs.slice(hosts=0, gpus=1).spawn("locks", Locks)
    with pytest.raises(SerializationError, match="cannot send"):
        mesh.lock.call_one().get()
    assert mesh.ping.call_one().get() == "pong"
    mesh.stop().get()


def test_a_broadcast_that_raises_ends_the_script_with_a_report(script: Any) -> None:
    run = script(
        """
        from mesh_core import this_host
        from core_samples import Echo

        if __name__ == "__main__":
            with this_host().spawn_procs() as procs:
                echo = procs.spawn("loud", Echo)
                echo.fail.broadcast(ValueError("nobody waits"))
                print(echo.echo.call_one("alive").get())
        """
    )
    out, err = run.finish()
    assert (run.process.returncode, out) == (1, "")
    assert "SupervisionError" in err
    assert "ValueError: nobody waits" in err
    assert "'loud'" in err


@pytest.mark.full
@pytest.mark.once
@pytest.mark.slow
@pytest.mark.timeout(170)
def test_an_argument_of_more_than_2_gib(one: Any) -> None:
    large = bytearray((2 << 30) + 5)
    large[-1] = 7
    assert one.call.call_one(length_and_last, large).get() == ((2 << 30) + 5, 7)


def length_and_last(data: Any) -> tuple[int, int]:
    return len(data), data[-1]


# Too late.


def test_a_call_after_the_actors_stop(procs: ProcMesh) -> None:
    mesh = procs.spawn("mixed", Mixed)
    mesh.stop().get()
    with pytest.raises(Undeliverable, match=r"'mixed' on rank 0 came back.*spawn the actor again"):
        mesh.note.call(1).get()
    with pytest.raises(ConnectionError):
        mesh.slice(hosts=1, gpus=1).note.call_one(1).get()
    mesh.note.broadcast(1)
    mesh.stop().get()


def test_a_call_after_the_processes_stop() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="gone")
    echo = procs.spawn("echo", Echo)
    assert echo.echo.call(1).get().values() == [1, 1]
    procs.stop().get()
    with pytest.raises(Undeliverable, match="cannot be reached"):
        echo.echo.call(1).get()
    with pytest.raises(Undeliverable):
        echo.slice(gpus=0).echo.call_one(1).get()
    with pytest.raises(Undeliverable):
        procs.spawn("more", Echo).initialized.get()
    echo.stop().get()


def test_a_call_after_shutdown(script: Any) -> None:
    run = script(
        """
        from mesh_core import MeshError, shutdown, this_host
        from core_samples import Echo

        if __name__ == "__main__":
            procs = this_host().spawn_procs(per_host={"gpus": 2})
            echo = procs.spawn("echo", Echo)
            waiting = echo.echo.call(1)
            shutdown()
            for late in (lambda: echo.echo.call(1).get(), procs.stop, lambda: procs.spawn("more", Echo)):
                try:
                    late()
                except MeshError as error:
                    print("shut down" in str(error))
            shutdown()
            with this_host().spawn_procs(per_host={"gpus": 2}) as again:
                print(again.spawn("echo", Echo).echo.call(2).get().values())
        """
    )
    assert run.finish()[0].splitlines() == ["True"] * 3 + ["[2, 2]"]


# Forks of a process that has a runtime.


def test_use_after_os_fork(one: Any, procs: ProcMesh) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for use in (
            lambda: one.echo.call_one(1).get(),
            lambda: one.echo.broadcast(1),
            lambda: procs.spawn("child", Echo),
            lambda: this_host().spawn_procs(),
            lambda: procs.stop().get(),
        ):
            try:
                use()
                said.append("nothing was raised")
            except MeshError as error:
                said.append(str(error))
            except BaseException as error:
                said.append(f"{type(error).__name__} {error}")
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read().splitlines()
    os.waitpid(pid, 0)
    assert len(said) == 5
    assert all("fork" in line for line in said), said


def test_multiprocessing_fork_leaves_the_parent_alone(script: Any) -> None:
    """A child that ends normally, with exit handlers, does not affect its parent."""
    run = script(
        """
        import multiprocessing, os
        from mesh_core import MeshError, this_host
        from core_samples import Echo

        def child(echo, queue):
            try:
                echo.echo.call(1).get()
            except MeshError as error:
                queue.put("fork" in str(error))

        if __name__ == "__main__":
            with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
                echo = procs.spawn("echo", Echo)
                echo.echo.call(0).get()
                fork = multiprocessing.get_context("fork")
                queue = fork.SimpleQueue()
                process = fork.Process(target=child, args=(echo, queue))
                process.start()
                process.join()
                print(process.exitcode, queue.get())
                if os.fork() == 0:
                    raise SystemExit(5)
                print(os.wait()[1] >> 8)
                print(echo.echo.call(2).get().values())
        """
    )
    out, err = run.finish()
    assert out.splitlines() == ["0 True", "5", "[2, 2]"], err
    assert run.process.returncode == 0


# Ctrl-C.

INTERRUPTED = """
    import os, signal, sys, threading
    from mesh_core import configure, this_host
    from core_samples import Coroutines, Echo, Gate

    def get(procs):
        gates = procs.spawn("gates", Coroutines)
        gates.initialized.get()
        print("now")
        gates.enter.call("never").get()

    def spinning(procs):
        echo = procs.spawn("echo", Echo)
        print("now")
        while True:
            echo.echo.call(1).get()

    def sending(procs):
        echo = procs.spawn("echo", Echo)
        print("now")
        while True:
            echo.echo.broadcast(b"x" * 100_000)

    def asyncio_run(procs):
        import asyncio

        async def main():
            print("now")
            await procs.spawn("gates", Coroutines).enter.call("never")

        asyncio.run(main())

    def spawning(procs):
        print("now")
        while True:
            with this_host().spawn_procs(per_host={"gpus": 4}) as more:
                more.spawn("echo", Echo).echo.call(1).get()

    def stopping(procs):
        print("now")
        while True:
            this_host().spawn_procs(per_host={"gpus": 2}).stop().get()

    def stuck(procs):
        gates = procs.spawn("gates", Gate)
        gates.initialized.get()
        gates.block.broadcast()
        print("now")
        procs.stop().get()

    if __name__ == "__main__":
        configure(stop_timeout=0.5)  # one of them will not stop by itself
        procs = this_host().spawn_procs(per_host={"gpus": 2})
        procs.initialized.get()
        globals()[sys.argv[1]](procs)
"""


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize(
    "moment", ["get", "spinning", "sending", "asyncio_run", "spawning", "stopping", "stuck"]
)
def test_ctrl_c_at_any_moment(script: Any, moment: str) -> None:
    run = script(INTERRUPTED, moment)
    assert run.line() == "now"
    watch = run.watch()
    os.kill(run.process.pid, signal.SIGINT)
    _, err = run.finish()
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert run.process.returncode in (-signal.SIGINT, 1, 130)
    assert watch.wait() == []


def test_ctrl_c_during_shutdown(script: Any) -> None:
    """Twice: the first is for the script, the second arrives while a process resists being stopped."""
    run = script(
        """
        from mesh_core import configure, this_host
        from core_samples import Gate

        if __name__ == "__main__":
            configure(stop_timeout=0.5)
            procs = this_host().spawn_procs(per_host={"gpus": 2})
            gates = procs.spawn("gates", Gate)
            gates.initialized.get()
            gates.block.broadcast()
            try:
                print("now")
                gates.block.call().get()
            finally:
                print("ending")
        """
    )
    assert run.line() == "now"
    watch = run.watch()
    os.kill(run.process.pid, signal.SIGINT)
    assert run.line() == "ending"
    os.kill(run.process.pid, signal.SIGINT)
    _, err = run.finish()
    assert "KeyboardInterrupt" in err
    assert watch.wait() == []


def test_ctrl_c_leaves_the_mesh_usable(script: Any) -> None:
    run = script(
        """
        from mesh_core import this_host
        from core_samples import Coroutines

        if __name__ == "__main__":
            with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
                actors = procs.spawn("actors", Coroutines)
                actors.initialized.get()
                for _ in range(3):
                    waiting = actors.enter.call("door")
                    try:
                        print("now")
                        waiting.get()
                    except KeyboardInterrupt:
                        print("interrupted")
                actors.open.call("door").get()
                print(waiting.get().values())
        """
    )
    for _ in range(3):
        assert run.line() == "now"
        os.kill(run.process.pid, signal.SIGINT)
        assert run.line() == "interrupted"
    assert (*run.finish(), run.process.returncode) == ("['door', 'door']\n", "", 0)


def test_a_users_own_signal_handler_runs_while_waiting(script: Any) -> None:
    run = script(
        """
        import os, signal
        from mesh_core import this_host
        from core_samples import Coroutines

        if __name__ == "__main__":
            signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
            with this_host().spawn_procs() as procs:
                actors = procs.spawn("actors", Coroutines)
                waiting = actors.enter.call_one("door")
                actors.initialized.get()
                try:
                    print("now")
                    waiting.get()
                except KeyboardInterrupt:
                    actors.open.call_one("door").get()
                    print(waiting.get())
        """
    )
    assert run.line() == "now"
    os.kill(run.process.pid, signal.SIGUSR1)
    assert run.line() == "handled"
    os.kill(run.process.pid, signal.SIGINT)
    assert run.finish()[0] == "door\n"


def test_all_errors_derive_from_mesh_error() -> None:
    for kind in (ActorError, SerializationError, SpawnError, SupervisionError, Undeliverable):
        assert issubclass(kind, MeshError)
