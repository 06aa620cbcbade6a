"""`mesh_core.testing`: the clock, temporarily installed plugins, processes for a test."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from core_samples import Echo

import mesh_core.testing
from mesh_core import PluginError, PluginLoadError, configured
from mesh_core._common.settings import current_settings
from mesh_core.plugins import COMMANDS, CommandPlugin, Plugin, PluginKind, PluginManager
from mesh_core.testing import (
    CommandPluginConformance,
    FakeClock,
    KindConformance,
    installed_plugins,
    local_procs,
)


def test_every_public_name_is_documented(page: Any) -> None:
    text = page("docs/reference/testing.md")
    for name in mesh_core.testing.__all__:
        assert f"`{name}" in text, f"docs/reference/testing.md does not mention {name}"
        assert (getattr(mesh_core.testing, name).__doc__ or "").strip()


# The clock.


def test_time_passes_only_by_advance() -> None:
    clock = FakeClock(10)
    assert (clock(), clock.now) == (10.0, 10.0)
    assert clock.advance(0) == 10.0
    assert clock.advance(2.5) == 12.5
    for wrong in (-1e-300, float("nan")):
        with pytest.raises(ValueError, match="at least 0"):
            clock.advance(wrong)


def test_timers_fire_in_the_order_of_their_times_each_at_its_own() -> None:
    clock, fired = FakeClock(), []
    for name, at in (("c", 3), ("a", 1), ("b", 2), ("a2", 1)):
        clock.call_later(at, lambda name=name: fired.append((name, clock())))
    dropped = clock.call_later(2, lambda: fired.append(("never", clock())))
    late = clock.call_later(9, lambda: None)
    dropped.cancel()
    assert clock.waiting == 5
    clock.advance(5)
    assert fired == [("a", 1), ("a2", 1), ("b", 2), ("c", 3)]
    late.cancel()
    assert clock.waiting == 0
    assert clock.call_later(0, lambda: fired.append(("now", clock()))) and fired[-1] == ("now", 5.0)


def test_a_timer_can_start_another() -> None:
    clock, fired = FakeClock(), []

    def tick() -> None:
        fired.append(clock())
        clock.call_later(1, tick)

    clock.call_later(1, tick)
    clock.advance(3.5)
    assert fired == [1, 2, 3]
    assert clock.now == 3.5


def test_sleeping_threads() -> None:
    clock, woken = FakeClock(), []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        woken.append(seconds)

    threads = [threading.Thread(target=sleep, args=[n]) for n in (1, 2)]
    for thread in threads:
        thread.start()
    clock.wait_until_waiting(2)
    clock.advance(1.5)
    threads[0].join(30)
    assert woken == [1]
    clock.advance(1)
    threads[1].join(30)
    assert woken == [1, 2]
    clock.sleep(0)
    with pytest.raises(TimeoutError, match="fewer than 1"):
        clock.wait_until_waiting(1, limit=0.01)


def test_sleeping_coroutines() -> None:
    clock = FakeClock()

    async def sleep(seconds: float) -> float:
        await clock.sleep_async(seconds)
        return clock.now

    async def main() -> list[float]:
        tasks = [asyncio.ensure_future(sleep(n)) for n in (0, 1, 2)]
        given_up = asyncio.ensure_future(sleep(3))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert clock.waiting == 2
        clock.advance(5)
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [0, 5, 5]


def test_a_timeout_by_the_clock() -> None:
    clock = FakeClock()

    async def late() -> None:
        async with clock.timeout(5):
            clock.advance(5)
            await asyncio.Event().wait()

    async def main() -> str:
        async with clock.timeout(5):
            clock.advance(4)
        with pytest.raises(TimeoutError):
            await late()
        assert clock.waiting == 0
        return "done"

    assert asyncio.run(main()) == "done"


# Temporarily installed plugins.


class Greet:
    def configure(self, parser: Any) -> None:
        parser.add_argument("--name", help="whom to greet")

    def run(self, args: Any) -> int:
        return 0


class TestACommandOfATest(CommandPluginConformance):
    plugin = CommandPlugin(name="greet", api_version=1, create=Greet, summary="say hello")
    distribution = "greeter"

    @pytest.fixture(autouse=True)
    def installed(self) -> Any:
        with installed_plugins(self.plugin, distribution="greeter"):
            yield


@dataclass(frozen=True, kw_only=True)
class ShelfPlugin(Plugin[None]):
    create: Callable[[], dict[str, bytes]]


SHELVES = PluginKind(
    word="shelf",
    group="mesh.shelves",
    hook="mesh_register_shelves",
    descriptor=ShelfPlugin,
    api_version=1,
    owner="mesh-shelves",
)
MEMORY = ShelfPlugin(name="memory", api_version=1, create=dict)
DISK = ShelfPlugin(name="disk", api_version=1, create=dict)
GREET = TestACommandOfATest.plugin


class TestAKindOfATest(KindConformance):
    kind = SHELVES

    @pytest.fixture(autouse=True)
    def installed(self) -> Any:
        with installed_plugins(kinds=[SHELVES], distribution="mesh-shelves"):
            yield


def test_installed_plugins_are_found_by_name_and_gone_afterwards() -> None:
    modules = set(sys.modules)
    before = len(sys.meta_path)
    with installed_plugins(MEMORY, DISK, GREET, kinds=[SHELVES], distribution="mesh-shelves"):
        manager = PluginManager()
        assert manager.get(SHELVES, "memory") is MEMORY
        assert manager.get(COMMANDS, "greet") is GREET
        assert manager.names(SHELVES) == ("disk", "memory")
        assert manager.origin(SHELVES, "disk") == "mesh-shelves 0.0"
        assert SHELVES in manager.kinds()
        with installed_plugins(ShelfPlugin(name="cloud", api_version=1, create=dict)):
            assert PluginManager().names(SHELVES) == ("cloud", "disk", "memory")
    assert SHELVES not in PluginManager().kinds()
    assert set(sys.modules) == modules and len(sys.meta_path) == before
    with pytest.raises(PluginError, match="no shelf is called 'memory'"):
        PluginManager().get(SHELVES, "memory")


def test_two_that_offer_one_name() -> None:
    with (
        installed_plugins(GREET, distribution="one"),
        installed_plugins(GREET, distribution="two"),
        pytest.raises(PluginLoadError, match=r"both one 0\.0 and two 0\.0 offer it"),
    ):
        PluginManager().get(COMMANDS, "greet")


def test_only_descriptors_of_known_kinds_are_installed() -> None:
    for wrong in (Greet(), MEMORY):
        with pytest.raises(TypeError, match="takes descriptors of declared kinds"), installed_plugins(wrong):  # type: ignore[arg-type]
            pass


# Processes for a test.


def test_local_procs_are_up_and_gone_afterwards(runtime: None) -> None:
    with configured(stop_timeout=9), local_procs(2, label="gpus", env={"FOR_A_TEST": "1"}) as procs:
        assert current_settings().stop_timeout == 2
        pids = procs.pids
        assert all(pids) and procs.sizes == {"gpus": 2}
        assert procs.spawn("echo", Echo).echo.call(1).get(timeout=30).values() == [1, 1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with local_procs() as procs:
        assert (len(procs), procs.sizes) == (1, {})
