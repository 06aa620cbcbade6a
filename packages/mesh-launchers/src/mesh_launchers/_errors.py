"""Errors of jobs of hosts."""

from __future__ import annotations

from typing import Any

from mesh_core import MeshError


class LaunchError(MeshError):
    """Hosts could not be started, or were lost.

    >>> raise LaunchError("host 2 of job 'train' has not started: Permission denied (publickey).", host=2)
    Traceback (most recent call last):
    mesh_launchers._errors.LaunchError: host 2 of job 'train' has not started: Permission denied (publickey).
    """

    def __init__(self, message: str, *, host: int | None = None) -> None:
        super().__init__(message)
        self.host = host
        """The host's number in the job, if the error is about one host."""

    def __reduce__(self) -> Any:
        return _again, (type(self), str(self), self.host)


class JobNotFound(LaunchError):
    """No job of that name is running."""


class JobExists(LaunchError):
    """A job of that name is running already, or another script has it."""


def _again(kind: type[LaunchError], message: str, host: int | None) -> LaunchError:
    return kind(message, host=host)
