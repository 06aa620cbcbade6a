"""The tests of actors and meshes on one host, repeated with the processes on two."""

import test_accumulator
import test_actors
import test_deadlines
import test_main_classes
import test_meshes
import test_values
from core_hosts import cluster, hosts, over_hosts, procs, runtime  # noqa: F401 - fixtures

globals().update(over_hosts(test_accumulator))
globals().update(over_hosts(test_actors, but=["test_an_actor_spawns_processes_of_its_own"]))
globals().update(over_hosts(test_deadlines))
globals().update(over_hosts(test_main_classes))
globals().update(over_hosts(test_meshes))
globals().update(over_hosts(test_values))
