"""The tests of order on one host, repeated with the processes on two."""

import test_order
from core_hosts import cluster, hosts, over_hosts, procs, runtime  # noqa: F401 - fixtures

globals().update(over_hosts(test_order))
