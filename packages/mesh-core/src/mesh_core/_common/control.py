"""Names of Mesh's own messages to a process, used in place of an extension's name."""

from __future__ import annotations

from typing import Final


class Control:
    """Names that no extension can have, because they begin with a dot."""

    STARTED: Final = ".started"
    """Have all extensions that the process was spawned with started? If one cannot, the process ends."""
    INSTALL: Final = ".install"
    """Install one more extension."""
    HOSTS: Final = ".hosts"
    """To the script: install an extension in the processes of hosts."""
    BOOTSTRAP: Final = ".bootstrap"
    """Run this function; an exception ends the process."""
    BYPASS: Final = ".bypass"
    """From the process to itself, on its first large part for another host: is something installed that moves those?"""
    RETURNS: Final = ".returns"
    """To the owner of supervised actors: has this one been respawned, or will it be?"""
    RECORD: Final = ".record"
    """To a controller that outlives its scripts: what a script is about to spawn, or has stopped."""
    LOGS: Final = ".logs"
    """To such a controller: what to do with the output of processes."""
    INSPECT: Final = ".inspect"
    """From the runtime to the controller: somebody connected to the job's inspection socket."""


LOGGING: Final = "mesh.logging"
"""The extension that a process's log level is sent to."""
