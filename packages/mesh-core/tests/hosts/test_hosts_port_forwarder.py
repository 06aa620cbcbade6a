"""The tests of forwarded ports on one host, repeated with the processes on two."""

import test_port_forwarder
from core_hosts import cluster, hosts, over_hosts, procs, runtime  # noqa: F401 - fixtures

globals().update(over_hosts(test_port_forwarder))
