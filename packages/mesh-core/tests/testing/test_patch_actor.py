"""`patch_actor` and `mock_actor`: where they apply, what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from mesh_core import Actor, ActorError, ProcMesh, endpoint, this_host, this_proc
from mesh_core.testing import mock_actor, patch_actor

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]


class Store(Actor):
    """Works in a program, but not in a test."""

    def __init__(self, url: str, *, timeout: float = 1.0) -> None:
        raise OSError(f"{url} cannot be reached")

    @endpoint
    def get(self, key: str, default: str = "") -> str:
        raise OSError("there is no store here")

    @endpoint
    async def put(self, key: str, /, value: str, *, retry: bool = False) -> None:
        raise OSError("there is no store here")


class StoreInMemory(Actor):
    """A mock that is not derived."""

    def __init__(self, url: str, *, timeout: float = 1.0) -> None:
        self.values = {"url": url}

    @endpoint
    def get(self, key: str, default: str = "") -> str:
        return self.values.get(key, default)

    @endpoint
    def put(self, key: str, /, value: str, *, retry: bool = False) -> None:
        self.values[key] = value


class StoreWithoutNetwork(Store):
    """A mock that is derived."""

    def __init__(self, url: str, *, timeout: float = 1.0) -> None:
        self.url = url

    @endpoint
    def get(self, key: str, default: str = "") -> str:
        return f"{key} of {self.url}"


class Program(Actor):
    """Spawns its own store."""

    @endpoint
    def near(self) -> str:
        store = this_proc().spawn("store", Store, "db://near")
        try:
            return str(store.get.call_one("url").get(timeout=30))
        finally:
            store.stop().get()

    @endpoint
    async def far(self) -> str:
        """Spawn it in a separate process, in an actor there."""
        async with this_host().spawn_procs() as procs:
            inner: Any = procs.spawn("inner", Program)
            return str(await inner.near.call_one())


def get_url(procs: ProcMesh) -> str:
    store = procs.spawn("store", Store, "db://main")
    try:
        return str(store.get.call_one("url").get(timeout=30))
    finally:
        store.stop().get()


@pytest.fixture
def one(procs: ProcMesh) -> ProcMesh:
    return procs.slice(hosts=0, gpus=0)


def test_a_spawn_gets_the_mock(one: ProcMesh) -> None:
    with patch_actor(Store, StoreInMemory) as entered:
        assert entered is StoreInMemory
        assert get_url(one) == "db://main"
    with pytest.raises(OSError, match="cannot be reached"):
        get_url(one)


def test_a_derived_mock(one: ProcMesh) -> None:
    with patch_actor(Store, StoreWithoutNetwork):
        assert get_url(one) == "url of db://main"


def test_the_mesh_has_the_class_of_the_mock(one: ProcMesh) -> None:
    with patch_actor(Store, StoreInMemory):
        store: Any = one.spawn("store", Store, "db://main")
    assert store.class_name == "StoreInMemory"
    store.put.call_one("a", value="b").get(timeout=30)  # it lives on behind the context
    assert store.get.call_one("a").get(timeout=30) == "b"
    store.stop().get()


def test_patches_nest(one: ProcMesh) -> None:
    with patch_actor(Store, StoreInMemory):
        with patch_actor(Store, StoreWithoutNetwork):
            assert get_url(one) == "url of db://main"
        assert get_url(one) == "db://main"
        # The mock of a patch is not patched in turn.
        with patch_actor(StoreInMemory, StoreWithoutNetwork):
            assert get_url(one) == "db://main"


def test_patch_ends_if_the_block_raises(one: ProcMesh) -> None:
    patch = patch_actor(Store, StoreInMemory)
    for _ in range(2):
        with pytest.raises(KeyError), patch:
            raise KeyError(get_url(one))
    with pytest.raises(OSError, match="cannot be reached"):
        get_url(one)


def test_patch_applies_to_all_threads(one: ProcMesh) -> None:
    seen: list[str] = []
    with patch_actor(Store, StoreInMemory):
        thread = threading.Thread(target=lambda: seen.append(get_url(one)))
        thread.start()
        thread.join()
    assert seen == ["db://main"]


def test_patch_applies_to_actors_in_this_process() -> None:
    with patch_actor(Store, StoreInMemory):
        program: Any = this_proc().spawn("program", Program)
        assert program.near.call_one().get(timeout=30) == "db://near"
        program.stop().get()


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_patch_applies_to_processes_spawned_in_the_block_and_to_theirs(start: Any) -> None:
    with patch_actor(Store, StoreInMemory), this_host().spawn_procs(start=start) as procs:
        program: Any = procs.spawn("program", Program)
        assert program.near.call_one().get(timeout=30) == "db://near"
        assert program.far.call_one().get(timeout=30) == "db://near"


def test_existing_processes_are_not_notified(one: ProcMesh) -> None:
    with patch_actor(Store, StoreInMemory):
        program: Any = one.spawn("program", Program)
        with pytest.raises(OSError, match="cannot be reached"):
            program.near.call_one().get(timeout=30)
        program.stop().get()


def test_processes_spawned_in_the_block_keep_the_patch_and_later_ones_lack_it() -> None:
    with patch_actor(Store, StoreInMemory):
        within = this_host().spawn_procs()
    with within, this_host().spawn_procs() as later:
        program: Any = within.spawn("program", Program)
        assert program.near.call_one().get(timeout=30) == "db://near"
        program = later.spawn("program", Program)
        with pytest.raises(OSError, match="cannot be reached"):
            program.near.call_one().get(timeout=30)


def test_classes_that_workers_cannot_import() -> None:
    class Real(Actor):
        @endpoint
        def who(self) -> str:
            return "real"

    class Mock(Actor):
        @endpoint
        def who(self) -> str:
            return "mock"

    class Spawner(Actor):
        @endpoint
        def spawn(self) -> str:
            return str(this_proc().spawn("who", Real).who.call_one().get(timeout=30))

    with patch_actor(Real, Mock), this_host().spawn_procs() as procs:
        assert procs.spawn("spawner", Spawner).spawn.call_one().get(timeout=30) == "mock"


def test_as_a_decorator(one: ProcMesh) -> None:
    @patch_actor(Store, StoreInMemory)
    def program(suffix: str) -> str:
        """What it does."""
        return get_url(one) + suffix

    @patch_actor(Store, StoreInMemory)
    async def program_async() -> str:
        await asyncio.sleep(0)
        return get_url(one)

    assert program("!") == "db://main!"
    assert (program.__name__, program.__doc__) == ("program", "What it does.")
    assert asyncio.run(program_async()) == "db://main"
    with pytest.raises(TypeError, match="decorates functions"):
        patch_actor(Store, StoreInMemory)(Program)


def test_patching_starts_no_runtime(script: Any) -> None:
    run = script(
        """
        from core_samples import Echo
        from mesh_core._common.current import holder
        from mesh_core.testing import patch_actor

        with patch_actor(Echo, Echo):
            pass
        print(holder().process)
        """
    )
    assert run.finish() == ("None\n", "")


# Refused mocks.


def test_every_missing_endpoint_is_named() -> None:
    class Half(Actor):
        def __init__(self, url: str, *, timeout: float = 1.0) -> None: ...

        @endpoint
        def git(self, key: str) -> str:
            return key

        def put(self, key: str, value: str) -> None: ...

    with pytest.raises(TypeError) as caught:
        patch_actor(Store, Half)
    text = str(caught.value)
    assert "Half cannot stand in for" in text
    assert "no endpoint 'get'; did you mean 'git'?" in text
    assert "no endpoint 'put' (it has a method of that name: mark it @endpoint)" in text


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ("self, key", "takes at most 1 positional argument, got 2"),
        ("self, key, default", "missing required argument 'default'"),
        ("self, name, default=''", "got unexpected argument 'key'"),
        ("self, key, default='', *, strict", "missing required argument 'strict'"),
        ("self, key, /, default=''", "got unexpected argument 'key'"),
        ("self, key, default='', more=None", ""),
        ("self, *args, **kwargs", ""),
        ("self, key='', default='', *args, strict=False", ""),
    ],
)
def test_signatures(parameters: str, complaint: str) -> None:
    made: dict[str, Any] = {}
    exec(f"def get({parameters}): ...", made)
    Real = type("Real", (Actor,), {"get": Store.__dict__["get"]})  # noqa: N806
    Mock = type("Mock", (Actor,), {"get": endpoint(made["get"])})  # noqa: N806
    if not complaint:
        patch_actor(Real, Mock)
        return
    with pytest.raises(TypeError) as caught:
        patch_actor(Real, Mock)
    assert complaint in str(caught.value)
    assert "its get(" in str(caught.value)


def test_variadic_endpoints_and_constructors() -> None:
    class Real(Actor):
        def __init__(self, rate: float) -> None: ...

        @endpoint
        def all(self, first: int, *rest: int, **named: int) -> None: ...

    class Narrow(Actor):
        @endpoint
        def all(self, first: int, second: int = 0) -> None: ...

    with pytest.raises(
        TypeError, match=r"its all\(first, second=0\) takes at most 2.*its constructor \(\) takes at most 0"
    ):
        patch_actor(Real, Narrow)

    class Unnamed(Real):
        @endpoint
        def all(self, first: int, *rest: int) -> None: ...

    with pytest.raises(TypeError, match="got unexpected argument 'any_other'"):
        patch_actor(Real, Unnamed)


@pytest.mark.parametrize("pair", [(Store, 3), (dict, StoreInMemory), (Actor, StoreInMemory), (Store, Actor)])
def test_only_actor_classes(pair: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match="takes two actor classes"):
        patch_actor(*pair)


# mock_actor().


def test_mock_actor_gives_the_specified_answers(one: ProcMesh) -> None:
    mock = mock_actor(Store, get=lambda key, default="": key + default)
    assert mock.__name__ == "MockStore"
    with patch_actor(Store, mock):
        store: Any = one.spawn("store", Store, "db://main", timeout=2)
    assert store.get.call_one("a", default="b").get(timeout=30) == "ab"
    assert store.put.call_one("a", value="b", retry=True).get(timeout=30) is None
    assert store.calls_received.call_one().get(timeout=30) == [
        ("get", ("a",), {"default": "b"}),
        ("put", ("a",), {"value": "b", "retry": True}),
    ]
    with pytest.raises(TypeError, match=r"get\(key, default=''\) missing required argument 'key'"):
        store.get.call_one()
    store.stop().get()


def test_mock_actor_raises_and_awaits(one: ProcMesh) -> None:
    async def later(key: str, value: str, retry: bool = False) -> int:
        await asyncio.sleep(0)
        return os.getpid()

    store: Any = one.spawn("store", mock_actor(Store, get=KeyError("k"), put=later), "db://main")
    with pytest.raises(KeyError) as caught:
        store.get.call_one("a").get(timeout=30)
    assert isinstance(caught.value, ActorError)
    assert store.put.call_one("a", "b").get(timeout=30) == one.pids[0]
    store.stop().get()


def test_mocks_that_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="has no endpoint 'gett' to answer for; did you mean 'get'"):
        mock_actor(Store, gett=1)
    with pytest.raises(TypeError, match="takes an actor class"):
        mock_actor(dict)

    class Clash(Actor):
        @endpoint
        def calls_received(self) -> None: ...

    with pytest.raises(TypeError, match="its own endpoint"):
        mock_actor(Clash)
    with pytest.raises(TypeError, match=r"MockStore\(url, timeout=1\.0\) missing required argument 'url'"):
        this_proc().spawn("store", mock_actor(Store))
