"""Futures in all kinds of event loops: several loops, closed loops, loops of other libraries, and threads beside them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import descriptors
from core_samples import Coroutines

from mesh_core import MeshError, ProcMesh, Promise, gather

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]


@pytest.fixture(scope="module", autouse=True)
def uvloops_own_pipe() -> None:
    """Let uvloop make the pipe that it makes with its first loop and keeps, before leaks are checked."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def one(echo: Any) -> Any:
    return echo.slice(hosts=0, gpus=0)


@pytest.fixture
def held(procs: ProcMesh) -> Iterator[Any]:
    """One actor with endpoints that do not return."""
    mesh = procs.slice(hosts=0, gpus=1).spawn("held", Coroutines)
    yield mesh
    mesh.stop().get()


def run_with_runner(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner() as runner:
        return runner.run(main)


def run_with_uvloop(main: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def run_with_anyio(main: Coroutine[Any, Any, Any]) -> Any:
    import anyio

    async def begin() -> Any:
        return await main

    return anyio.run(begin)


@pytest.fixture(params=["asyncio.run", "asyncio.Runner", "uvloop", "anyio"])
def run(request: pytest.FixtureRequest) -> Any:
    """A way to run a coroutine."""
    name = request.param
    if not name.startswith("asyncio"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    return {
        "asyncio.run": asyncio.run,
        "asyncio.Runner": run_with_runner,
        "uvloop": run_with_uvloop,
        "anyio": run_with_anyio,
    }[name]


# What all loops have in common.


def test_promises_in_a_loop(run: Run) -> None:
    async def main() -> list[int]:
        first, second = Promise[int](), Promise[int]()
        thread = threading.Thread(target=lambda: (second.set_result(2), first.set_result(1)))
        thread.start()
        got = [await first.future, *await gather(second.future, asyncio.sleep(0, 3))]
        thread.join()
        return got

    assert run(main()) == [1, 2, 3]


def test_await_and_get_in_a_loop(run: Run, one: Any) -> None:
    async def main() -> list[int]:
        first = await one.echo_async.call_one(1)
        return [first, one.echo_async.call_one(2).get(timeout=30), await one.echo.call_one(3)]

    assert run(main()) == [1, 2, 3]


def test_get_in_a_loop_while_others_await(run: Run, one: Any, held: Any) -> None:
    """`get` blocks the loop; the answers for other coroutines arrive nevertheless, and are there afterwards."""

    async def main() -> list[Any]:
        waiting = [held.enter.call_one("x").as_asyncio() for _ in range(3)]
        shared = held.enter.call_one("x")
        waiting.append(shared.as_asyncio())
        await asyncio.sleep(0)
        held.open.call_one("x").get(timeout=30)
        assert shared.get(timeout=30) == "x"
        assert one.echo.call_one(1).get(timeout=30) == 1
        return await asyncio.gather(*waiting)

    assert run(main()) == ["x"] * 4


def test_asyncios_functions_for_several_futures(run: Run, one: Any, held: Any) -> None:
    async def ask(n: int) -> int:
        answer: int = await one.echo_async.call_one(n)
        return answer

    async def too_long() -> None:
        async with asyncio.timeout(30) as limit:
            holding = held.hold.call_one()
            await held.holding.call_one()
            limit.reschedule(0)
            await holding

    async def main() -> list[Any]:
        gathered = await asyncio.gather(*(one.echo.call_one(n) for n in range(3)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(n)) for n in range(20)]
        limited = await asyncio.wait_for(one.echo.call_one(4), 30)
        async with asyncio.timeout(30):
            limited += await one.echo.call_one(5)
        with pytest.raises(TimeoutError):
            await too_long()
        assert await held.cancelled.call_one()
        done, _ = await asyncio.wait([one.echo.call_one(6).as_asyncio()])
        shielded = await asyncio.shield(one.echo.call_one(7))
        first = [await each for each in asyncio.as_completed([one.echo.call_one(8)])]
        return [gathered, [task.result() for task in tasks], limited, done.pop().result(), shielded, first]

    assert run(main()) == [[0, 1, 2], list(range(20)), 9, 6, 7, [8]]


def test_a_failure_in_a_task_group_cancels_the_others(run: Run, one: Any, held: Any) -> None:
    async def fail() -> None:
        await held.holding.call_one()
        await one.fail.call_one(KeyError("k"))

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(hold(held))
            group.create_task(fail())

    async def main() -> bool:
        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert caught.group_contains(KeyError)
        return bool(await held.cancelled.call_one())

    assert run(main())


async def hold(held: Any) -> None:
    await held.hold.call_one()


def test_get_in_an_executor_of_the_loop(run: Run, one: Any) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        blocking = [loop.run_in_executor(None, one.echo.call_one(n).get) for n in range(8)]
        awaited = [one.echo_async.call_one(n).as_asyncio() for n in range(8)]
        return [*await asyncio.gather(*blocking), *await asyncio.gather(*awaited)]

    assert run(main()) == [*range(8), *range(8)]


def test_consecutive_loops_leave_nothing_behind(run: Run, one: Any) -> None:
    async def main(n: int) -> int:
        answer: int = await one.echo_async.call_one(n)
        return answer

    run(main(0))
    gc.collect()
    before = len(descriptors())
    assert [run(main(n)) for n in range(20)] == list(range(20))
    gc.collect()
    assert len(descriptors()) <= before


# Between loops.


def test_a_future_made_in_one_loop_is_awaited_in_another(run: Run, held: Any) -> None:
    async def make() -> Any:
        return held.enter.call_one("x"), held.enter.call_one("x")

    async def wait(future: Any) -> Any:
        await held.open.call_one("x")
        return await future

    first, second = run(make())
    assert asyncio.run(wait(first)) == "x"
    assert second.get(timeout=30) == "x"
    assert run(wait(second)) == "x"


def test_loops_in_several_threads_await_one_future(held: Any) -> None:
    future = held.enter.call_one("x")
    seen: list[Any] = []
    begun = threading.Semaphore(0)

    async def wait() -> None:
        begun.release()
        seen.append(await future)

    threads = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    held.open.call_one("x").get()
    for thread in threads:
        thread.join(30)
    assert seen == ["x"] * 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_closed_while_a_task_awaits(held: Any, one: Any) -> None:
    """The answer comes when the loop is closed: this raises nothing, and the future has the answer."""
    future = held.enter.call_one("x")

    async def wait() -> None:
        await future

    async def begin() -> asyncio.Task[None]:
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        return task

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # for the report about a destroyed pending task
    task = loop.run_until_complete(begin())
    loop.close()
    held.open.call_one("x").get()
    assert one.echo.call_one(1).get(timeout=30) == 1
    assert future.get(timeout=30) == "x"

    async def again() -> Any:
        return await future

    assert asyncio.run(again()) == "x"
    del task, loop
    gc.collect()


def test_asyncio_run_cancels_pending_calls(held: Any) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(hold(held))
        await held.holding.call_one()
        assert not task.done()

    asyncio.run(main())
    assert held.cancelled.call_one().get(timeout=30)


# Other libraries.


def test_cancellation_by_anyio_cancels_the_call(held: Any) -> None:
    anyio = pytest.importorskip("anyio", reason="anyio is not installed")

    async def main() -> bool:
        with anyio.move_on_after(0.05) as scope:
            await held.hold.call_one()
        assert scope.cancelled_caught
        return bool(await held.cancelled.call_one())

    assert anyio.run(main)


@pytest.mark.parametrize("limit", [None, 30.0])
def test_awaiting_without_an_asyncio_loop_explains_what_to_do(held: Any, limit: float | None) -> None:
    """As under trio: step a coroutine while no asyncio event loop runs."""
    future = held.hold.with_options(timeout=limit).call_one()

    async def main() -> None:
        await future

    coroutine = main()
    with pytest.raises(MeshError, match=r"asyncio event loop only.*run_sync\(future\.get\)"):
        coroutine.send(None)
    future.cancel()


ASYNC_TESTS = """
import asyncio
import pytest
from mesh_core import proc_mesh, this_host
from core_samples import Echo

{mark}
@pytest.fixture
def echo():
    with this_host().spawn_procs({{"gpus": 2}}) as procs:
        yield procs.spawn("echo", Echo)

@{fixture}
async def other():
    async with proc_mesh(gpus=1) as procs:
        yield await procs.spawn("other", Echo)

@pytest.mark.parametrize("n", range(3))
async def test_a_loop_per_test(echo, n):
    assert (await echo.echo.call(n)).values() == [n, n]
    assert echo.echo.call(n).get().values() == [n, n]

async def test_an_async_fixture(other):
    assert await asyncio.gather(*(other.echo.call_one(n) for n in range(5))) == list(range(5))
"""


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_pytest_asyncio(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("pytest_asyncio", reason="pytest-asyncio is not installed")
    strict = mode == "strict"
    source = ASYNC_TESTS.format(
        mark="import pytest_asyncio; pytestmark = pytest.mark.asyncio" if strict else "",
        fixture="pytest_asyncio.fixture" if strict else "pytest.fixture",
    )
    (tmp_path / "test_async.py").write_text(textwrap.dedent(source))
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\nasyncio_mode = {mode}\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\npythonpath = {Path(__file__).parents[1]}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
