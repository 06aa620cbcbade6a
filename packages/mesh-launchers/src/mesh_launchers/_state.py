"""The state of a job's hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mesh_launchers._contract import Phase
from mesh_launchers._renewal import CredentialsState

_SHOWN = 3


@dataclass(frozen=True)
class HostState:
    """One host of a job."""

    number: int
    name: str
    mesh: str
    phase: Phase
    why: str = ""
    address: str | None = None
    differs: tuple[str, ...] = ()
    """How its packages differ from those of the script."""

    @property
    def is_there(self) -> bool:
        """Whether it is running or may still start."""
        return self.phase in (Phase.WAITING, Phase.STARTING, Phase.RUNNING)


@dataclass(frozen=True)
class JobState:
    """The state of a job at one moment."""

    name: str
    launcher: str
    hosts: tuple[HostState, ...]
    used_by: int | None = None
    """The process of the script that has its hosts, if one has."""
    keep: float | None = None
    """How many seconds the hosts stay when no script has them; ``None`` if they end with the script."""
    left: float | None = None
    """The seconds until they end, because no script has them."""
    dial: str | None = None
    """Where the script waits for its hosts, if these connect to it."""
    credentials: CredentialsState | None = None
    """Until when its certificates hold; ``None`` while it begins."""
    explains: bool = False
    """Whether its launcher reports why hosts end, for failures in the script."""

    def __str__(self) -> str:
        """Say how many hosts run, and why others do not."""
        running = sum(each.phase is Phase.RUNNING for each in self.hosts)
        text = f"job {self.name}: {running} of {sum(each.phase is not Phase.ENDED for each in self.hosts)} hosts run"
        whys: dict[str, list[str]] = {}
        for each in self.hosts:
            if each.phase in (Phase.WAITING, Phase.STARTING, Phase.FAILED):
                words = f"{each.phase}: {each.why.splitlines()[0]}" if each.why else str(each.phase)
                whys.setdefault(words, []).append(each.name)
        for why, names in list(whys.items())[:_SHOWN]:
            who = ", ".join(names[:_SHOWN]) + (
                f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            )
            text += f"; {who} {why}"
        if self.credentials is not None and self.credentials.trouble:
            text += f"; credentials: {self.credentials.trouble}"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        credentials = None if self.credentials is None else self.credentials.as_dict()
        return {**asdict(self), "credentials": credentials}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> JobState:
        """Undo :meth:`as_dict`."""
        hosts = tuple(
            HostState(**{**each, "phase": Phase(each["phase"]), "differs": tuple(each["differs"])})
            for each in told["hosts"]
        )
        credentials = None if told["credentials"] is None else CredentialsState.of(told["credentials"])
        return cls(**{**told, "hosts": hosts, "credentials": credentials})
