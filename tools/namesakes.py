"""An actor whose endpoints are called like what a mesh has, for the tests of several packages."""

# ruff: noqa: D102 - the class says it

from __future__ import annotations

from mesh_core import Actor, endpoint


class Namesakes(Actor):
    """Has an endpoint of every name that a mesh has, but does not reserve; each returns its name."""

    @endpoint
    def alive(self) -> str:
        return "alive"

    @endpoint
    def class_name(self) -> str:
        return "class_name"

    @endpoint
    def failed(self) -> str:
        return "failed"

    @endpoint
    def mesh(self) -> str:
        return "mesh"

    @endpoint
    def name(self) -> str:
        return "name"

    @endpoint
    def respawn(self) -> str:
        return "respawn"
