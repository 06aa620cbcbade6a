"""The tests of pools on one host, repeated with the replicas on two."""

import test_pool
from core_hosts import cluster, hosts, over_hosts, procs, runtime  # noqa: F401 - fixtures

globals().update(over_hosts(test_pool))
