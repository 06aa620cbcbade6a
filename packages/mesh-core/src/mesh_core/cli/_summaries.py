"""One-line summaries of Mesh's own commands, so that `mesh --help` can show them without importing the commands."""

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
