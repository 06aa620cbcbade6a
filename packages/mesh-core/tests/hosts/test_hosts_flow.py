"""The tests of flow control on one host, repeated with the processes on two."""

import test_flow
from core_hosts import cluster, hosts, over_hosts, procs, runtime  # noqa: F401 - fixtures

globals().update(over_hosts(test_flow))
