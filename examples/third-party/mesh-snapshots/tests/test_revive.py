"""The policies as functions, without processes."""

from dataclasses import replace

import pytest
from mesh_snapshots import REVIVE, REVIVE_PROCS, Revive

from mesh_core import FailureKind
from mesh_core.policies import Due, Ended, Escalate, Failed, Respawn, Restart
from mesh_core.testing import PolicyPluginConformance


class TestRevive(PolicyPluginConformance):
    plugin = REVIVE
    distribution = "mesh-snapshots"


class TestReviveProcs(PolicyPluginConformance):
    plugin = REVIVE_PROCS
    distribution = "mesh-snapshots"


FAILED = Failed("a", 0, FailureKind.KILLED)


@pytest.mark.parametrize("action", [Restart(), Respawn()])
def test_one_more_than_is_revived_is_passed_on(action: Restart | Respawn) -> None:
    policy = Revive(most=2, period=30.0, action=action)
    for now in (0.0, 1.0):
        policy, actions = policy.on(FAILED, now)
        assert actions == [action]
    policy, actions = policy.on(FAILED, now=2.0)
    assert actions == [Escalate("3 failures within 30 s, 2 is revived")]


def test_failures_are_forgotten_after_the_period() -> None:
    policy = Revive(most=1, period=30.0)
    for now in (0.0, 30.0, 60.0):
        policy, actions = policy.on(FAILED, now)
        assert actions == [Restart()]


def test_it_ignores_what_is_not_a_failure() -> None:
    policy = replace(Revive(most=1, period=30.0), failures=(1.0,))
    for event in (Ended("a", 0), Due("")):
        assert policy.on(event, 2.0) == (policy, [])
