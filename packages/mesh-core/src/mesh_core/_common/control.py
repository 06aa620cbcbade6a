"""What Mesh itself says to a process: the names of the messages, in the place of an extension's name."""

from __future__ import annotations

from typing import Final


class Control:
    """Names that no extension can have, as they begin with a dot."""

    STARTED: Final = ".started"
    """Have the extensions that the process was spawned with started? One that cannot ends the process."""
    INSTALL: Final = ".install"
    """Have one more extension."""
    HOSTS: Final = ".hosts"
    """To the script: have an extension in the processes of hosts."""
    BOOTSTRAP: Final = ".bootstrap"
    """Run this function; what it raises ends the process."""
    BYPASS: Final = ".bypass"
    """By the process itself: its first large part for another host has come by. Is something installed that moves those?"""
    RETURNS: Final = ".returns"
    """To the owner of supervised actors: is there a later life of this one, or will there be?"""
    RECORD: Final = ".record"
    """To a controller that outlives its scripts: what a script is about to spawn, or has stopped."""
    LOGS: Final = ".logs"
    """To such a controller: what is done with what processes print."""
    INSPECT: Final = ".inspect"
    """Somebody has connected to the job's inspection socket: the runtime tells the controller."""


LOGGING: Final = "mesh.logging"
"""The extension to which a process's level of logs is sent."""
