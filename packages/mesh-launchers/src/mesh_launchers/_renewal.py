"""The certificates of a job's hosts: until when they hold, and how they are renewed while the job runs.

CRT-1: a job does not end because its certificates have become old: those that `launch` has made are renewed at half of their life, and every new
certificate, whoever has made it, reaches the hosts while they run.
CRT-2: certificates that nobody renews are reported while a quarter of their life is left.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mesh_core import Credentials, MeshError

_EARLY = timedelta(minutes=5)
"""So long before it was made a certificate begins to hold."""
_LONGEST_PAUSE_S = 60.0
_PAUSES = 100
"""How many times in its life a certificate is looked at."""
_UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0}
_PASSED_ON = ("host.pem", "crl.pem")
"""What changes in a host's folder. Neither is secret."""


@dataclass(frozen=True)
class CredentialsState:
    """Until when the certificates of a job's hosts and of its script hold."""

    until: datetime
    is_renewed: bool
    """Whether the job renews them by itself; those of a folder that the user has made are renewed by ``mesh credentials renew``."""
    trouble: str = ""
    """Why the job may end at that time, and what to do."""

    @property
    def remaining(self) -> timedelta:
        """How long they hold from now on; negative once they have expired."""
        return self.until - datetime.now(UTC)

    def __str__(self) -> str:
        """Say for how long they hold."""
        left = max(0.0, self.remaining.total_seconds())
        unit, size = next((each for each in _UNITS.items() if left >= each[1]), ("s", 1.0))
        how = "in trouble" if self.trouble else "renewed" if self.is_renewed else "not renewed"
        return f"{int(left / size)} {unit}, {how}"

    def as_dict(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {"until": self.until.isoformat(), "is_renewed": self.is_renewed, "trouble": self.trouble}

    @classmethod
    def of(cls, told: Mapping[str, object]) -> CredentialsState:
        """Undo :meth:`as_dict`."""
        return cls(datetime.fromisoformat(str(told["until"])), bool(told["is_renewed"]), str(told["trouble"]))


class Renewal:
    """Keeps the certificates of one folder valid, and knows which of them the hosts have."""

    def __init__(
        self,
        path: Path,
        lifetime: float | None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock = clock
        self._credentials = Credentials.load(path)
        self._lifetime = None if lifetime is None else timedelta(seconds=lifetime)
        """That of new certificates; none for a folder of the user's own."""
        self._hosts = self._ordered = self._files()
        """What the hosts have, and what they were told last."""
        self._use()
        self._trouble = self._end_is_near()

    @property
    def state(self) -> CredentialsState:
        """Until when the hosts and the script can reach each other."""
        return CredentialsState(self._until, self._lifetime is not None, self._trouble)

    @property
    def pause(self) -> float:
        """How many seconds may pass until the next look."""
        return min(_LONGEST_PAUSE_S, self._life / timedelta(seconds=_PAUSES))

    def look(self) -> str | None:
        """Renew what is due; return an order for the programs of the hosts if these need something new (CRT-1)."""
        try:
            if self._lifetime is not None and self._expiry() - self._clock() < self._lifetime / 2:
                self._credentials.renew(lifetime=self._lifetime)
            self._ordered = self._files()
            if self._ordered == self._hosts:
                self._use()
        except (MeshError, OSError) as error:
            self._trouble = f"they hold until {self._when()}, and cannot be renewed: {error}"
            return None
        self._trouble = self._end_is_near()
        return None if self._ordered == self._hosts else _order(self._ordered)

    def reached(self, missing: str = "") -> None:
        """The hosts have got the last order; or not all of them have, and why: then the next look gives it again."""
        if missing:
            self._trouble = f"the hosts hold theirs until {self._when()}: {missing}"
            return
        self._hosts = self._ordered
        self._use()
        self._trouble = self._end_is_near()

    def _use(self) -> None:
        """Reckon with the certificates that are in the folder."""
        (host,) = Credentials.load(self._credentials.host_path).certificates
        self._until = self._expiry()
        self._life = self._lifetime or host.not_after - host.not_before - _EARLY

    def _end_is_near(self) -> str:
        """Say what to do where nobody renews them (CRT-2)."""
        if self._lifetime is not None or self._until - self._clock() > self._life / 4:
            return ""
        return (
            f"they hold until {self._when()}, and all hosts are lost then: run `mesh credentials renew {self._credentials.path}`, "
            "and the job gives the new ones to its hosts"
        )

    def _when(self) -> str:
        return f"{self._until:%Y-%m-%d %H:%M:%S} UTC"

    def _expiry(self) -> datetime:
        """Return when the first of the certificates in use expires."""
        issued = self._credentials.certificates
        script = max((each.not_before, each.not_after) for each in issued if each.role == "controller")[1]
        hosts = Credentials.load(self._credentials.host_path).certificates
        return min(script, *(each.not_after for each in hosts))

    def _files(self) -> dict[str, bytes]:
        return {name: (self._credentials.host_path / name).read_bytes() for name in _PASSED_ON}


def _order(files: Mapping[str, bytes]) -> str:
    """Return what the program of a host is told; see `_program.py`."""
    text = json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()})
    return f"renew {base64.b64encode(text.encode()).decode()}"
