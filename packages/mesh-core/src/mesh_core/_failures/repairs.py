"""Carries out a policy's repairs, using the methods of its mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError
from mesh_core._geometry.location import single
from mesh_core._geometry.mesh import Kind

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from mesh_core._failures.policies import Respawn, Restart
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.procs import ProcMesh


def _are_actors(mesh: ProcMesh | ActorMesh[Any]) -> TypeIs[ActorMesh[Any]]:
    return mesh._kind is Kind.ACTORS


async def carry_out(mesh: ProcMesh | ActorMesh[Any], action: Restart | Respawn) -> None:
    """Carry out one repair that a policy asked for."""
    from mesh_core._failures.policies import Restart

    is_actors = _are_actors(mesh)
    if is_actors != isinstance(action, Restart):
        what, right = ("actors", "Restart") if is_actors else ("processes", "Respawn")
        raise MeshError(f"{action!r} cannot repair {what}, which this policy supervises; use {right}")
    places = mesh._places(action.ranks)
    if _are_actors(mesh) and action.ranks is None:
        places = _not_taken_away(mesh, places)
    if not places:
        return
    lost = {point.rank for point in mesh._itself.failed()}
    for living in [place for place in places if place not in lost]:
        one = mesh._with_region(single(mesh._view.rank_at(living)))
        if _are_actors(one):
            if one._making is not None and one._making.holding is not None and one._making.holding.returns:
                one._making.holding.returns.struck(living)
            await one._stop()
        else:
            await one.stop()
    if _are_actors(mesh):
        await _respawn_below(mesh, places)
    await mesh._itself.respawn(places)


def _not_taken_away(mesh: ActorMesh[Any], places: list[int]) -> list[int]:
    """Return the places without those whose processes :func:`shrink` stopped."""
    procs = None if mesh._making is None else mesh._making.procs
    recipe = None if procs is None else procs._recipe
    root = None if recipe is None else recipe.root
    return places if root is None else [place for place in places if mesh._view.rank_at(place) in root]


async def _respawn_below(mesh: ActorMesh[Any], places: list[int]) -> None:
    """Respawn the processes that these actors need, if they ended."""
    making = mesh._making
    dead = set(mesh._ended()).intersection(places)
    if not dead:
        return
    procs = None if making is None else making.procs
    if procs is None:
        raise MeshError(f"cannot respawn {mesh!r}: its processes ended, and its owner did not spawn them")
    ranks = sorted(mesh._view.rank_at(place) for place in dead)
    await procs._with_region(procs._root).respawn(ranks)
