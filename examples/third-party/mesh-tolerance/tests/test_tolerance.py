"""The policy as a function, without processes; the suite of its kind; and once at work."""

from mesh_tolerance import TOLERATE, Tolerate

from mesh_core import Actor, FailureKind, MeshFailure, endpoint, set_fault_handler, this_host
from mesh_core.policies import Escalate, Failed, Ignore, Stop
from mesh_core.testing import PolicyPluginConformance


class TestTolerance(PolicyPluginConformance):
    plugin = TOLERATE
    distribution = "mesh-tolerance"


def test_one_more_than_is_tolerated_stops_and_escalates() -> None:
    policy = Tolerate(most=2, period=30.0)
    for now in (0.0, 1.0):
        policy, actions = policy.on(Failed("a", 0, FailureKind.EXITED), now)
        assert actions == [Ignore()]
    policy, actions = policy.on(Failed("a", 0, FailureKind.EXITED), now=2.0)
    assert actions == [Stop(), Escalate("3 failures within 30 s, 2 is tolerated")]


def test_failures_are_forgotten_after_the_period() -> None:
    policy = Tolerate(most=1, period=30.0)
    for now in (0.0, 30.0, 60.0):
        policy, actions = policy.on(Failed("a", 0, FailureKind.EXITED), now)
        assert actions == [Ignore()]


def test_want_of_memory_counts_double() -> None:
    _, actions = Tolerate(most=1, period=30.0).on(Failed("a", 0, FailureKind.OUT_OF_MEMORY), now=0.0)
    assert actions[0] == Stop()


class Worker(Actor):
    @endpoint
    def crash(self) -> None:
        raise RuntimeError("crash")


def test_by_name_at_work() -> None:
    import queue

    passed_on: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    set_fault_handler(passed_on.put)
    try:
        with this_host().spawn_procs({"gpus": 4}) as procs:
            workers = procs.spawn("workers", Worker, supervise="tolerate")
            workers.crash.broadcast()
            failure = passed_on.get(timeout=30)
        assert failure.chain == ("the policy of 'workers': 4 failures within 60 s, 3 is tolerated",)
    finally:
        set_fault_handler(None)
