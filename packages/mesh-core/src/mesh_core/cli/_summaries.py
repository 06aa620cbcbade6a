"""What Mesh's own commands do, in a line each: `mesh --help` shows them and imports no command for that."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SUMMARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "credentials": "make, show, renew and revoke what the members of a job prove themselves with",
        "debug": "debug actors that are stopped at a breakpoint",
        "doctor": "check that this machine is ready for Mesh",
        "host": "serve jobs on this machine",
        "look": "look into a running job: its tree, events, logs, and the stacks of its processes",
        "plugins": "list the plugins of this environment, and what keeps any from working",
    }
)
