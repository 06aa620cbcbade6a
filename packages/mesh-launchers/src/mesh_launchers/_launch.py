"""How scripts get hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh_core import MeshError
from mesh_core.extensions import check_free, has_joined
from mesh_launchers._authority import authority, sweep
from mesh_launchers._comparing import refusal
from mesh_launchers._door import Door
from mesh_launchers._errors import JobNotFound, LaunchError
from mesh_launchers._folder import JobFolder
from mesh_launchers._host_facts import environment
from mesh_launchers._job import Job, wants_progress
from mesh_launchers._plan import Plan
from mesh_launchers._state import JobState

JOB_VARIABLE = "MESH_JOB"
"""The variable by which a script that ``mesh run`` starts finds its job."""
_CONNECT_S = 10.0


def launch(
    launcher: str,
    hosts: int | Sequence[str] | None = None,
    *,
    name: str | None = None,
    meshes: Mapping[str, int | Sequence[str] | Mapping[str, Any]] | None = None,
    spares: int | Sequence[str] = 0,
    keep: str | float | None = None,
    progress: bool | None = None,
    credentials: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Job:
    """Start hosts with a launcher, and return at once: messages to them wait until they are ready.

    >>> from mesh_core import Actor, endpoint
    >>> from mesh_launchers import launch
    >>> class Greeter(Actor):
    ...     @endpoint
    ...     def greet(self, name):
    ...         return f"hello {name}"
    >>> with launch("local", hosts=2) as job:
    ...     procs = job.hosts.spawn_procs(per_host={"gpus": 1})
    ...     procs.spawn("greeters", Greeter).greet.call("you").get(timeout=60).values()
    ['hello you', 'hello you']

    Args:
        launcher: the name of the launcher; ``mesh plugins`` lists the installed ones.
        hosts: how many; or their names, for launchers such as ``ssh`` that need names.
        name: the name by which other terminals find the job; by default the launcher's name and a number.
        meshes: several meshes of hosts instead of one: ``{"trainers": 2, "generators": {"hosts": 4, "partition": "cheap"}}``, with options
            of their own.
        spares: the number of additional hosts on which nothing runs: ``job.spares``.
        keep: how long the job stays when no script has it, such as ``"8h"``: its hosts, and the processes and actors on them. By
            default it ends with the script. :func:`attach_job` attaches it again. The script becomes a part of the job: it can have
            one such job at a time, and no other hosts.
        progress: whether to show the progress on stderr if hosts take longer than a second; by default on a terminal.
        credentials: a folder that ``mesh credentials new`` has made; by default some are made, which are removed with the job.
        options: the launcher's own; an unknown one is a ``TypeError`` that names the nearest.
    """
    plan = Plan.of(
        launcher,
        hosts,
        name=name,
        meshes=meshes,
        spares=spares,
        keep=keep,
        credentials=credentials,
        **options,
    )
    _check_free(plan.name, is_kept=plan.keep is not None)
    folder, connection = plan.begin()
    try:
        return _taken(folder, connection, progress, is_new=True, is_kept=plan.keep is not None)
    except JobNotFound:
        raise plan.has_ended(folder) from None
    finally:
        plan.let_go()


def attach_job(name: str | None = None, *, take_over: bool = False, progress: bool | None = None) -> Job:
    """Attach this script to a kept job; without a name, to the job with which ``mesh run`` has started the script.

    Another script may have launched the job and ended, in whatever way. The meshes that it spawned are still there, in :attr:`Job.procs` and
    :attr:`Job.actors`. If another script still has the job, :class:`JobExists` is raised; if there is no such job,
    :class:`JobNotFound`.

    Args:
        name: the job's name.
        take_over: take the job away from the script that has it. That script can do nothing in the job from then on, and gets an error when it tries.
        progress: as in :func:`launch`.
    """
    name = name or os.environ.get(JOB_VARIABLE)
    if name is None:
        raise JobNotFound(
            "attach_job() wants a job's name where `mesh run` has not started the script; `mesh jobs` lists the jobs that run"
        )
    folder = JobFolder.of(name)
    connection = folder.connect(_CONNECT_S)
    try:
        told = folder.read()
        is_kept = told["keep"] is not None
        _check_free(name, is_kept=is_kept)
        if refused := refusal(told["environment"], environment()):
            raise LaunchError(
                f"job {name!r} cannot be attached: {refused.partition(': ')[0]}. Run the script in the environment from which the job was "
                f"launched ({told['environment']['executable']}); or end the job (`mesh stop {name}`), and launch another"
            )
        if not is_kept:
            authority().take(Path(told["credentials"]), name)
    except BaseException:
        connection.close()
        raise
    return _taken(folder, connection, progress, is_new=False, is_kept=is_kept, take_over=take_over)


def jobs() -> list[JobState]:
    """Return the jobs of this user on this machine. Remains of killed jobs are removed."""
    sweep()
    found = []
    for folder in JobFolder.all():
        try:
            door = Door(folder.name, folder.connect(_CONNECT_S))
        except LaunchError:
            continue  # it is starting, or ending
        try:
            found.append(JobState.of(door.ask("state")))
        except LaunchError:
            continue
        finally:
            door.close()
    return found


def _check_free(name: str, *, is_kept: bool) -> None:
    """Refuse what a process cannot do that is part of a job already."""
    if is_kept:
        try:
            check_free()
        except MeshError as error:
            raise LaunchError(f"job {name!r} is kept, and so its script is a part of it: {error}") from None
    elif has_joined():
        raise LaunchError(
            "this script is a part of a job that is kept, and has the hosts of that job alone: launch others in another script, or "
            "call job.detach() first"
        )


def _taken(
    folder: JobFolder,
    connection: socket.socket,
    progress: bool | None,
    *,
    is_new: bool,
    is_kept: bool,
    take_over: bool = False,
) -> Job:
    credentials = None if is_kept else authority().credentials()
    job = Job(folder, credentials, progress=wants_progress(progress))
    door = Door(folder.name, connection, job._hear)  # noqa: SLF001 - one with it
    try:
        job._open(door, is_new=is_new, take_over=take_over)  # noqa: SLF001 - likewise
    except BaseException:
        door.close()
        raise
    if not is_kept:
        authority().follow_deaths(job._has_died)  # noqa: SLF001 - likewise
    return job
