"""A process that runs hears of a workspace: where to import from, and what to import again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_core._workspace._place import Workspace, lead_packages, put_on_path
from mesh_core._workspace._synced import Synced

if TYPE_CHECKING:
    from mesh_core._stage import Stage


class Told(NamedTuple):
    """What a process that runs is told."""

    workspaces: list[list[Any]]
    """All that there are, as in ``Synced.told``."""
    source: str
    to: str
    """Which of them was synced."""
    changed: list[str]
    """Its files that may have been imported as they were before."""
    again: bool
    """Whether to import them again."""


class Answer(NamedTuple):
    """What came of it in one process."""

    reloaded: tuple[str, ...]
    kept: tuple[str, ...]
    failed: str
    """Why nothing was imported again; empty if nothing went wrong."""


async def hear(stage: Stage, told: Told) -> list[Answer]:
    """Do what the controller's ``tell_running`` asks of this process, and of those that it has spawned."""
    process = stage.process
    process.slots.of(Synced).told = told.workspaces
    scratch = process.identity.scratch
    put_on_path(told.workspaces, scratch)
    workspace = next(
        Workspace.told(each) for each in told.workspaces if (each[0], each[2]) == (told.source, told.to)
    )
    root = workspace.root(scratch)
    lead_packages(told.source, root)
    answers = []
    if told.changed or told.again:
        from mesh_core._workspace._reload import mark, reload

        mark(process, workspace, str(root), told.changed)
        if told.again:
            answers.append(reload(stage, workspace, str(root)))
    from mesh_core._workspace._fleet import send_told

    for future in send_told(process, told, set()):
        answers += await future
    return answers
