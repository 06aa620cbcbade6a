"""The policies that are found by name, and combinations of them, against the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from mesh_core import FailureKind
from mesh_core.plugins import POLICIES, PluginManager, PolicyPlugin
from mesh_core.testing import installed_plugins
from mesh_supervision import (
    Backoff,
    ByKind,
    ByRank,
    CircuitBreaker,
    Escalate,
    Ignore,
    Levels,
    OneForAll,
    OneForOne,
    RestForOne,
)
from mesh_supervision.testing import PolicyConformance

# Policies that are found by name pass all of the suite. Of what is made of them a run takes a third of the policies for each test.
repeated = pytest.mark.sampled(3)


class Named(PolicyConformance):
    distribution = "mesh-supervision"
    most_restarts: ClassVar[tuple[int, float] | None] = (3, 60.0)


@pytest.mark.python
class TestOneForOne(Named):
    plugin = PluginManager().get(POLICIES, "one_for_one")


class TestOneForAll(Named):
    plugin = PluginManager().get(POLICIES, "one_for_all")


class TestRestForOne(Named):
    plugin = PluginManager().get(POLICIES, "rest_for_one")


class TestEscalate(Named):
    plugin = PluginManager().get(POLICIES, "escalate")
    most_restarts = None


class TestIgnore(Named):
    plugin = PluginManager().get(POLICIES, "ignore")
    most_restarts = None


class MadeUp(PolicyConformance):
    distribution = "mesh-test-plugins"

    @pytest.fixture(autouse=True)
    def installed(self) -> Iterator[Any]:
        with installed_plugins(self.plugin):  # type: ignore[arg-type]
            yield


@repeated
class TestWithoutBackoff(MadeUp):
    plugin = PolicyPlugin(
        name="plain", api_version=1, create=lambda: OneForOne(intensity=5, period=7.0), summary="no backoff"
    )
    most_restarts = (5, 7.0)


@repeated
class TestTypes(MadeUp):
    plugin = PolicyPlugin(
        name="types",
        api_version=1,
        create=lambda: OneForAll(
            intensity=2, period=30.0, restart="transient", ranks={0: "permanent", 1: "temporary"}
        ),
        summary="three types of restart",
    )
    most_restarts = (2, 30.0)


@repeated
class TestLevels(MadeUp):
    """Each restart of the upper level lets the lower one begin anew: 2 single ones for each of 2 and the first."""

    plugin = PolicyPlugin(
        name="levels",
        api_version=1,
        create=lambda: Levels(
            OneForOne(intensity=2, period=60.0),
            OneForAll(intensity=2, period=600.0, backoff=Backoff(free=0, initial=1.0)),
        ),
        summary="single ranks, then all",
    )
    most_restarts = (8, 60.0)


@repeated
class TestByKind(MadeUp):
    plugin = PolicyPlugin(
        name="by-kind",
        api_version=1,
        create=lambda: ByKind(
            {
                FailureKind.OUT_OF_MEMORY: Escalate("more memory is needed"),
                FailureKind.EXITED: RestForOne(intensity=1, period=60.0),
            },
            otherwise=OneForOne(intensity=3, period=60.0, backoff=Backoff()),
        ),
        summary="by what has happened",
    )
    most_restarts = (4, 60.0)


@repeated
class TestByRank(MadeUp):
    plugin = PolicyPlugin(
        name="by-rank",
        api_version=1,
        create=lambda: ByRank({0: OneForAll(intensity=1, period=9.0), 1: Ignore()}, otherwise=Escalate()),
        summary="by who has died",
    )
    most_restarts = (1, 9.0)


@repeated
class TestBreaker(MadeUp):
    """The trial counts as a restart beside those of the policy, which begins anew after it."""

    plugin = PolicyPlugin(
        name="breaker",
        api_version=1,
        create=lambda: CircuitBreaker(OneForOne(intensity=2, period=60.0), cooldown=60.0, trips=2),
        summary="leaves it alone for a while",
    )
    most_restarts = (4, 60.0)
