"""A one-line summary of each command of Mesh's packages, so that `mesh --help` imports no command.

Commands of other packages are described by the summary of their distribution.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SUMMARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "credentials": "create, show, renew and revoke the credentials of a job",
        "debug": "debug actors that are stopped at a breakpoint",
        "doctor": "check that this machine is ready for Mesh",
        "host": "serve jobs on this machine",
        "look": "look into a running job: its tree, events, logs, and the stacks of its processes",
        "plugins": "list the installed plugins, and why any of them cannot be used",
    }
)
"""Commands of mesh-core."""

SIBLING_SUMMARIES: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {
        ("mesh-launchers", "exec"): "run a command on a job's hosts",
        ("mesh-launchers", "jobs"): "list the jobs of hosts that run",
        ("mesh-launchers", "logs"): "show what a job's hosts have written",
        ("mesh-launchers", "run"): "run a script with hosts of a launcher",
        ("mesh-launchers", "scale"): "have more hosts in a job, or fewer",
        ("mesh-launchers", "shell"): "open a terminal on a host of a job",
        ("mesh-launchers", "stop"): "end jobs, with their hosts",
        ("mesh-supervision", "dashboard"): "show a running job as a page in a browser",
        ("mesh-supervision", "metrics"): "serve a job's numbers to Prometheus",
        ("mesh-supervision", "top"): "watch a running job on the screen",
        ("mesh-supervision", "trace"): "record what a running job does, for Perfetto",
        ("mesh-supervision", "why"): "say why a running job makes no progress",
    }
)
"""Commands of the other packages, by distribution and name."""
