"""What a plugin's hook returns: small frozen descriptions, which do no work until :attr:`create` is called.

PLUG-1: making a descriptor is cheap and has no effect; whatever is heavy is imported inside ``create``.
PLUG-2: ``probe`` is cheap, never raises, and says yes with what there is, or no with the reason and the remedy.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

Capability: TypeAlias = str | int | float | bool
"""What a capability may be: something that JSON can say, since it is shown, compared and sent to other hosts."""

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
MAX_NAME_LENGTH: Final = 64


def name_problem(name: object) -> str | None:
    """What is wrong with ``name`` as a plugin's name, or ``None``.

    >>> name_problem("ib-verbs") is None
    True
    >>> name_problem("Foo Bar")
    "'Foo Bar' is not lower-case letters, digits, and single '-' or '_' between them"
    """
    if not isinstance(name, str):
        return f"a name is a str, not {type(name).__name__}"
    if len(name) > MAX_NAME_LENGTH:
        return f"{name[:20]!r}... is longer than {MAX_NAME_LENGTH} characters"
    if _NAME.fullmatch(name) is None:
        return f"{name!r} is not lower-case letters, digits, and single '-' or '_' between them"
    return None


@dataclass(frozen=True)
class ProbeResult:
    """Whether a plugin can work here: with its capabilities, or with the reason why not and the remedy.

    >>> bool(ProbeResult.yes(max_bytes=1 << 30))
    True
    >>> print(ProbeResult.no("no InfiniBand device", remedy="load the mlx5_ib module"))
    no: no InfiniBand device (load the mlx5_ib module)
    """

    available: bool
    capabilities: Mapping[str, Capability] = field(default_factory=dict, hash=False)
    reason: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.available and (self.reason or self.remedy):
            raise ValueError(
                "an available ProbeResult has capabilities, no reason or remedy: use ProbeResult.yes()"
            )
        if not self.available and not (self.reason and self.remedy):
            raise ValueError("a ProbeResult that says no gives a reason and a remedy: use ProbeResult.no()")
        for key, value in self.capabilities.items():
            if not isinstance(value, (str, int, float)):
                raise TypeError(
                    f"capability {key!r} is a str, int, float or bool, not {type(value).__name__}"
                )
        object.__setattr__(self, "capabilities", MappingProxyType(dict(self.capabilities)))

    @classmethod
    def yes(cls, **capabilities: Capability) -> "ProbeResult":
        """Available, with what it can do."""
        return cls(True, capabilities)

    @classmethod
    def no(cls, reason: str, *, remedy: str) -> "ProbeResult":
        """Not available: why, and what would change that."""
        return cls(False, {}, reason, remedy)

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        if not self.available:
            return f"no: {self.reason} ({self.remedy})"
        return "yes" + "".join(f" {key}={value}" for key, value in self.capabilities.items())

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping does not pickle, and the two ends of a link tell each other what they found.
        return ProbeResult, (self.available, dict(self.capabilities), self.reason, self.remedy)


def always_available() -> ProbeResult:
    """The probe of a plugin that needs nothing special."""
    return ProbeResult.yes()


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What every kind of plugin says about itself. Hooks return one of its subclasses."""

    name: str
    """What the user selects it by; the same as its entry point's name."""

    api_version: int
    """The version of this kind's contract that the plugin was written for, such as ``1``."""

    create: Callable[..., Any]
    """Makes the thing itself; called only when the plugin has been selected."""

    probe: Callable[[], ProbeResult] = always_available
    """Whether it can work on this machine."""

    summary: str = ""
    """One line for lists and help."""

    def __post_init__(self) -> None:
        problem = name_problem(self.name)
        if problem is not None:
            raise ValueError(f"{type(self).__name__}: {problem}")
        if (
            not isinstance(self.api_version, int)
            or isinstance(self.api_version, bool)
            or self.api_version < 1
        ):
            raise ValueError(
                f"{type(self).__name__} {self.name!r}: api_version is a whole number from 1, not {self.api_version!r}"
            )
        for what in ("create", "probe"):
            if not callable(getattr(self, what)):
                raise TypeError(f"{type(self).__name__} {self.name!r}: {what} is not callable")
        if not isinstance(self.summary, str) or "\n" in self.summary:
            raise ValueError(f"{type(self).__name__} {self.name!r}: summary is one line of text")


class TransportPlugin(Plugin):
    """A way to move bytes between processes; ``create`` makes a transport as ``mesh_rdma`` defines it."""


class LauncherPlugin(Plugin):
    """A way to get hosts; ``create`` makes a launcher as ``mesh_launchers`` defines it."""


class PolicyPlugin(Plugin):
    """A supervision policy; ``create`` makes a policy as ``mesh_supervision`` defines it."""


@runtime_checkable
class Command(Protocol):
    """A subcommand of ``mesh``.

    >>> class Greet:
    ...     def configure(self, parser):
    ...         parser.add_argument("name")
    ...     def run(self, args):
    ...         print(f"Hello, {args.name}!")
    ...         return 0
    >>> isinstance(Greet(), Command)
    True
    """

    def configure(self, parser: ArgumentParser) -> None:
        """Declare options and arguments; called before :meth:`run`, and for ``--help``."""

    def run(self, args: Namespace) -> int:
        """Do the work, print to stdout, and return the exit status: 0 for success, 1 for failure."""
        ...


@dataclass(frozen=True, kw_only=True)
class CommandPlugin(Plugin):
    """A subcommand of ``mesh``; ``create()`` makes a :class:`Command`.

    >>> CommandPlugin(name="greet", api_version=1, create=lambda: Greet(), summary="say hello").name
    'greet'
    """

    create: Callable[[], Command]


Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing a doctor check found out.

    >>> Finding(status="warn", detail="1,024 open files allowed", remedy="ulimit -n 65536").status
    'warn'
    """

    status: Status
    """``ok``; ``warn``: works, but slower or smaller than it could; ``fail``: something of Mesh will not work."""

    detail: str
    """What was found, in one line with the figures."""

    remedy: str = ""
    """What to do about it; needed unless ``ok``."""

    def __post_init__(self) -> None:
        if self.status not in ("ok", "warn", "fail"):
            raise ValueError(f"a Finding's status is 'ok', 'warn' or 'fail', not {self.status!r}")
        if not self.detail:
            raise ValueError("a Finding says in its detail what was found")
        if self.status != "ok" and not self.remedy:
            raise ValueError(f"a Finding that is {self.status!r} says in its remedy what to do")


Check: TypeAlias = Callable[[], Iterable[Finding]]
"""What a doctor check's ``create`` returns: called once, gives one or more findings."""


@dataclass(frozen=True, kw_only=True)
class DoctorCheck(Plugin):
    """A check for ``mesh doctor``; ``probe`` says whether it applies to this machine, ``create()`` gives the check.

    >>> def check():
    ...     yield Finding(status="ok", detail="all well")
    >>> DoctorCheck(name="health", api_version=1, create=lambda: check).name
    'health'
    """

    create: Callable[[], Check]
