"""The tests of ports on one host, repeated with the processes on two."""

import test_ports
from core_hosts import cluster, hosts, over_hosts, procs, runtime  # noqa: F401 - fixtures

globals().update(over_hosts(test_ports))
