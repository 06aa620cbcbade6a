"""Names, options and results that programs from elsewhere use."""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

import pytest

from mesh_core import (
    Actor,
    ActorError,
    Future,
    MeshError,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    as_completed,
    attach_to_workers,
    context,
    endpoint,
    gather,
    run_worker_loop_forever,
    this_host,
    wait,
)
from mesh_core.testing import LocalCluster

WITHIN = 30.0


class Relay(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    def see(self, n: int) -> None:
        self.seen.append(n)

    @endpoint
    def look(self) -> list[int]:
        return self.seen

    @endpoint
    def pass_on(self, others: Any, n: int) -> Any:
        return others.see.broadcast(n)

    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    def mesh_sizes(self) -> tuple[dict[str, int], str, list[int]]:
        procs = context().actor_instance.proc_mesh
        others: Any = procs.spawn("others", Relay)
        return procs.sizes, procs.name, [len(each) for each in others.look.call().get(WITHIN).values()]


@pytest.fixture
def pair(runtime: None) -> Any:
    with this_host().spawn_procs({"gpus": 2}, "pair") as procs:
        yield procs


def test_the_original_exception(pair: ProcMesh) -> None:
    relay: Any = pair.spawn("relay", Relay).slice(gpus=0)
    with pytest.raises(ActorError) as caught:
        relay.fail.call_one(KeyError("x")).get(WITHIN)
    assert type(caught.value.exception) is KeyError
    with pytest.raises(ActorError) as caught:
        relay.fail.call_one(SystemExit(3)).get(WITHIN)
    assert isinstance(caught.value.exception, BaseException)
    lonely = ActorError("no original")
    assert lonely.exception is lonely


def test_a_message_that_is_being_sent_is_nothing_elsewhere(pair: ProcMesh) -> None:
    relays: Any = pair.spawn("relays", Relay)
    assert relays.slice(gpus=0).pass_on.call_one(relays.slice(gpus=1), 7).get(WITHIN) is None
    while relays.slice(gpus=1).look.call_one().get(WITHIN) != [7]:
        pass


def test_the_mesh_of_an_actors_process(pair: ProcMesh) -> None:
    relays: Any = pair.spawn("relays", Relay)
    assert relays.slice(gpus=1).mesh_sizes.call_one().get(WITHIN) == ({"gpus": 2}, "pair", [0, 0])


def test_what_is_done_can_be_awaited(pair: ProcMesh) -> None:
    async def main() -> None:
        assert await pair.logging_option() is None
        done = Future.of(3)
        assert await asyncio.wait_for(done.as_asyncio(), WITHIN) == 3
        assert await gather(done, Future.of(4)) == [3, 4]

    asyncio.run(main())
    done = Future.of(3)
    called: list[Future[int]] = []
    done.add_done_callback(called.append)
    assert called == [done]
    assert (done.get(0), done.done(), done.exception(), done.cancel()) == (3, True, None, False)
    assert wait([done], timeout=WITHIN)[0] == [done]
    assert list(as_completed([done], timeout=WITHIN)) == [done]
    with pytest.raises(ZeroDivisionError):
        done.then(lambda n: n / 0).get(0)
    assert "done" in repr(done)


def test_a_shutdown_can_be_awaited(script: Any) -> None:
    run = script(
        """
        import asyncio
        from mesh_core import shutdown, this_host

        async def main():
            this_host().spawn_procs()
            print(await shutdown(), shutdown().get(0))

        if __name__ == "__main__":
            asyncio.run(main())
        """
    )
    out, err = run.finish()
    assert out == "None None\n", err


def test_errors_are_what_programs_expect(pair: ProcMesh) -> None:
    assert issubclass(MeshError, RuntimeError)
    relays: Any = pair.spawn("relays", Relay)
    relays.initialized.get(WITHIN)
    relays.stop().get(WITHIN)
    with pytest.raises(SupervisionError) as caught:
        relays.slice(gpus=0).look.call_one().get(WITHIN)
    assert isinstance(caught.value, Undeliverable)
    assert caught.value.failure is None
    pair.stop().get(WITHIN)
    with pytest.raises(SupervisionError, match="its process was stopped"):
        relays.slice(gpus=0).look.call_one().get(WITHIN)


@pytest.mark.slow
def test_hosts_are_shut_down(runtime: None) -> None:
    with LocalCluster(hosts=1) as cluster:
        hosts = cluster.attach()
        hosts.spawn_procs().initialized.get(WITHIN)
        hosts.shutdown().get(WITHIN)
        with pytest.raises(Undeliverable):
            hosts.spawn_procs()


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: attach_to_workers(["x"], credentials="x", ca="y"), r"'ca': .* credentials= names"),  # type: ignore[arg-type]
        (lambda: attach_to_workers(["x"], credentials="x", fanout=3), "did you mean 'fan_out'"),  # type: ignore[arg-type]
        (lambda: run_worker_loop_forever("x", credentials="x", ca="y"), r"'ca': .* credentials= names"),  # type: ignore[arg-type]
        (lambda: this_host().spawn_procs(bootstrap_command="x"), r"env=, and another interpreter in python="),  # type: ignore[arg-type]
        (lambda: endpoint(propagate=builtins.id), r"remote\(actors.step, propagate=\.\.\.\)"),  # type: ignore[call-overload]
        (lambda: endpoint(instrument=False), "OpenTelemetry"),  # type: ignore[call-overload]
        (lambda: endpoint(concurent=True), "did you mean 'concurrent'"),  # type: ignore[call-overload]
    ],
)
def test_options_of_others_say_where_they_are_here(runtime: None, call: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        call()
