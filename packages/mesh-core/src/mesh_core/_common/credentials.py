"""A job's credentials, by which its members prove to each other that they belong to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from mesh_core._common.errors import AuthenticationError
from mesh_core._native import (
    credentials_issue,
    credentials_list,
    credentials_new,
    credentials_owner,
    credentials_renew,
    credentials_revoke,
)

LIFETIME: Final = timedelta(days=7)
"""How long certificates are valid by default."""

LONGEST: Final = timedelta(days=3660)
"""The lifetime of the certificate authority, which no certificate exceeds."""

Role: TypeAlias = Literal["controller", "host", "observer"]
_ROLES: Final[tuple[Role, ...]] = get_args(Role)
_Told: TypeAlias = tuple[str, str, str, str, float, float, float | None]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The contents of a certificate. None of them is secret."""

    role: Role
    """``"controller"`` may begin a job on a host, ``"host"`` may join a job, ``"observer"`` may only look into a job."""
    job: str
    """The job's name, which is random and shared by all members of the job."""
    serial: str
    fingerprint: str
    """SHA-256 of the certificate."""
    not_before: datetime
    not_after: datetime
    revoked: datetime | None = None
    """When it was revoked, if it was."""

    @property
    def remaining(self) -> timedelta:
        """How long it remains valid; negative once it has expired."""
        return self.not_after - datetime.now(UTC)

    @property
    def state(self) -> Literal["valid", "expired", "revoked", "not yet valid"]:
        """Whether its owner is accepted now."""
        if self.revoked is not None:
            return "revoked"
        now = datetime.now(UTC)
        if now > self.not_after:
            return "expired"
        return "valid" if now >= self.not_before else "not yet valid"


class Credentials:
    """The credentials of one job, in a folder: a certificate authority and the certificates it issued.

    A host gets a separate folder without the authority: either the ``host`` folder that :meth:`new` makes, which all hosts
    may share, or one per host from :meth:`issue_host`, so that each can be revoked alone.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> credentials = Credentials.new(folder.name)
    >>> b7 = credentials.issue_host(Path(folder.name) / "b7", lifetime=timedelta(hours=12))
    >>> [certificate.role for certificate in credentials.certificates]
    ['controller', 'host', 'host']
    >>> credentials.revoke(b7).state
    'revoked'
    >>> folder.cleanup()
    """

    __slots__ = ("_owner", "_path")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a folder, as :meth:`load` does."""
        self._path = Path(path)
        self._owner = credentials_owner(self._path)

    @classmethod
    def new(
        cls,
        path: str | os.PathLike[str],
        *,
        lifetime: timedelta | float = LIFETIME,
        host_lifetime: timedelta | float | None = None,
    ) -> Credentials:
        """Create a new job's credentials in a folder that does not exist yet or is empty.

        The folder has mode 0700 and its files 0600. ``lifetime`` is how long the controller's certificate is valid, and
        also those of the hosts unless ``host_lifetime`` is given: a ``timedelta`` or seconds, ten years at most.
        """
        controller = _seconds(lifetime)
        hosts = controller if host_lifetime is None else _seconds(host_lifetime)
        credentials_new(Path(path), controller, hosts)
        return cls(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Credentials:
        """Open the folder of a job's owner or of a host."""
        return cls(path)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def host_path(self) -> Path:
        """The folder to copy to hosts."""
        return self._path / "host" if self._owner else self._path

    @property
    def owner(self) -> bool:
        """Whether this folder has the job's authority, which can issue and revoke certificates."""
        return self._owner

    @property
    def job(self) -> str:
        """The job's name."""
        return self.certificates[0].job

    @property
    def certificates(self) -> tuple[Certificate, ...]:
        """The certificates that were issued, oldest first; in a host's folder, the host's own."""
        return tuple(_certificates(credentials_list(self._path)))

    def issue_host(
        self, path: str | os.PathLike[str], *, lifetime: timedelta | float = LIFETIME
    ) -> Certificate:
        """Create a folder with just what a host needs: ``ca.pem``, ``crl.pem``, ``host.pem``, ``host.key``."""
        return _certificate(credentials_issue(self._path, Path(path), _seconds(lifetime), False))

    def issue_observer(
        self, path: str | os.PathLike[str], *, lifetime: timedelta | float = LIFETIME
    ) -> Certificate:
        """Create a folder for somebody who may look into the job from another machine, and do nothing else.

        ``mesh look --host ADDRESS --credentials DIR`` and :func:`mesh_core.inspect.connect` take such a folder. Its certificate
        can neither begin nor join a job, and nobody connects to its holder.
        """
        return _certificate(credentials_issue(self._path, Path(path), _seconds(lifetime), True))

    def renew(
        self, path: str | os.PathLike[str] | None = None, *, lifetime: timedelta | float = LIFETIME
    ) -> tuple[Certificate, ...]:
        """Issue new certificates for the keys in a host's folder, or without ``path`` for those in this folder.

        Running members load a new certificate by themselves, and connections stay open. Copy only ``host.pem`` to
        a host whose folder was renewed here.
        """
        told = credentials_renew(self._path, self._path if path is None else Path(path), _seconds(lifetime))
        return tuple(_certificates(told))

    def revoke(self, which: str | os.PathLike[str] | Certificate) -> Certificate:
        """Revoke a certificate, so that its owner is no longer accepted anywhere.

        Name it by its serial number or fingerprint, by the first digits of either, or by its file. All certificates for the
        same key, from before or after a renewal, are revoked too, and the key gets no new one. A running controller that
        uses this folder drops its owner at once and notifies all hosts of the job.
        """
        name = which.serial if isinstance(which, Certificate) else os.fspath(which)
        return _certificate(credentials_revoke(self._path, name))

    def __repr__(self) -> str:
        return f"Credentials({str(self._path)!r})"


def _seconds(lifetime: timedelta | float) -> float:
    seconds = lifetime.total_seconds() if isinstance(lifetime, timedelta) else float(lifetime)
    if not seconds > 0:
        raise ValueError(f"lifetime must be positive, got {lifetime!r}")
    return seconds


def _certificates(told: list[_Told]) -> Iterator[Certificate]:
    return map(_certificate, told)


def _certificate(told: _Told) -> Certificate:
    role, job, serial, fingerprint, not_before, not_after, revoked = told
    made = Certificate(
        next(known for known in _ROLES if known == role),
        job,
        serial,
        fingerprint,
        _time(not_before),
        _time(not_after),
    )
    return made if revoked is None else replace(made, revoked=_time(revoked))


def _time(seconds: float) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError) as error:
        raise AuthenticationError(
            f"a certificate has an invalid date: {seconds} s since the epoch"
        ) from error
