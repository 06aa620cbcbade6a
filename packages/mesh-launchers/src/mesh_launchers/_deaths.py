"""What a job's controller knows of deaths of hosts, for whoever keeps the job: both agree on which hosts are there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mesh_core import MeshError, inspect


def follow_deaths(tell: Callable[[str, str], object]) -> None:
    """Call a function, on a thread of its own, with the name of each host that has died and the reason, until the runtime is closed."""
    try:
        events = inspect.events(past=True, actors=False)
    except MeshError:
        return  # only the script hears of all of them

    def run() -> None:
        for event in events:
            if event.kind == "host_died":
                tell(event.host, event.text)

    threading.Thread(target=run, name="mesh-launchers-deaths", daemon=True).start()
