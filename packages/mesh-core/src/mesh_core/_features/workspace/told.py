"""Tell running processes about a workspace: where to import from, and what to reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._common.codes import MessageKind, Request
from mesh_core._common.proc import signed
from mesh_core._features.workspace.placing import Workspace, lead_packages, put_on_path
from mesh_core._features.workspace.synced import Answer, Synced, Told
from mesh_core._futures.future import Future
from mesh_core._native import Lost

if TYPE_CHECKING:
    from mesh_core._hosting.actor_host import ActorHost
    from mesh_core._native import Call
    from mesh_core._process.process import Process
    from mesh_core.extensions import Extension


async def hear(copies: Extension, actor_host: ActorHost, told: Told) -> list[Answer]:
    """Do what the controller's ``tell_running`` asks of this process and of the processes that it spawned."""
    process = actor_host.process
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
        from mesh_core._features.workspace.reload import mark, reload

        mark(process, workspace, str(root), told.changed)
        if told.again:
            answers.append(reload(actor_host, workspace, str(root)))
    for future in send_told(copies, process, told, set()):
        answers += await future
    return answers


def send_told(copies: Extension, process: Process, told: Told, but: set[int]) -> list[Future[list[Answer]]]:
    """Send a message to all processes that this one spawned, except meshes in ``but``; they pass it on to theirs."""
    futures = []
    for _, owned_meshes in process.owners.all():
        for procs in owned_meshes.procs():
            if procs._procs_id not in but:
                # Processes spawned before the first sync do not have the extension.
                copies.install_on(procs)
                sender = process.runtime.sender(procs._target(), 0, copies.name, Request.EXTENSION)
                call = sender.call(signed(process, told))
                what = f"telling {procs._name!r} of a workspace"
                futures.append(Future(process, call, _answers, lambda what=what: what))  # type: ignore[misc]
    return futures


def _answers(call: Call) -> list[Answer]:
    """Collect the answers of processes; those that have ended have nothing to reload."""
    answers: list[Answer] = []
    for outcome in call.outcomes():
        if outcome is None or isinstance(outcome, Lost) or outcome.kind is MessageKind.UNDELIVERABLE:
            continue
        if outcome.is_error:
            from mesh_core._serialize.exceptions import decode_exception

            raise decode_exception(*outcome.raw())
        answers += outcome.load()
    return answers
