"""Descriptors, which a plugin's hook returns: small frozen dataclasses that do no work until :attr:`create` is called.

Making a descriptor is cheap and has no effect; heavy imports belong inside ``create``.

PLUG-2: ``probe`` is cheap, never raises, and returns yes with capabilities, or no with a reason and a remedy.
"""

from __future__ import annotations

import dataclasses
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

from mesh_core._common.checks import is_whole

if TYPE_CHECKING:
    from mesh_core.policies import Policy

Capability: TypeAlias = str | int | float | bool | None
"""The type of a field of a capabilities dataclass: JSON can express it, so it can be shown, compared and sent."""

C = TypeVar("C")

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
MAX_NAME_LENGTH: Final = 64


def name_problem(name: object) -> str | None:
    """Return what is wrong with a plugin's name, or ``None``.

    >>> name_problem("ib-verbs") is None
    True
    >>> name_problem("Foo Bar")
    "'Foo Bar' is not lower-case letters, digits, and single '-' or '_' between them"
    """
    if not isinstance(name, str):
        return f"a name must be a str, got {type(name).__name__}"
    if len(name) > MAX_NAME_LENGTH:
        return f"{name[:20]!r}... is longer than {MAX_NAME_LENGTH} characters"
    if _NAME.fullmatch(name) is None:
        return f"{name!r} is not lower-case letters, digits, and single '-' or '_' between them"
    return None


@dataclass(frozen=True)
class ProbeResult(Generic[C]):
    """Whether a plugin can work here: yes with its capabilities, or no with a reason and a remedy.

    Capabilities are an instance of the frozen dataclass that the plugin's kind defines.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class StoreCapabilities:
    ...     max_bytes: int
    >>> print(ProbeResult.yes(StoreCapabilities(max_bytes=1 << 30)))
    yes max_bytes=1073741824
    >>> bool(ProbeResult.yes())
    True
    >>> print(ProbeResult.no("no InfiniBand device", remedy="load the mlx5_ib module"))
    no: no InfiniBand device (load the mlx5_ib module)
    """

    available: bool
    capabilities: C | None = None
    reason: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.available and (self.reason or self.remedy):
            raise ValueError("an available ProbeResult has no reason and no remedy. Use ProbeResult.yes().")
        if not self.available and not (self.reason and self.remedy):
            raise ValueError(
                "an unavailable ProbeResult must have a reason and a remedy. Use ProbeResult.no()."
            )
        for key, value in _fields(self.capabilities).items():
            if value is not None and not isinstance(value, (str, int, float)):
                raise TypeError(
                    f"capability {key!r} must be a str, int, float, bool or None, got {type(value).__name__}"
                )

    @staticmethod
    def yes(capabilities: C | None = None) -> ProbeResult[C]:
        """Return that the plugin is available, with its capabilities."""
        return ProbeResult(True, capabilities)

    @staticmethod
    def no(reason: str, *, remedy: str) -> ProbeResult[Any]:
        """Return that the plugin is not available, why, and what would change that."""
        return ProbeResult(False, None, reason, remedy)

    def as_dict(self) -> dict[str, Capability]:
        """Return the capabilities by name; empty if there are none."""
        return _fields(self.capabilities)

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        if not self.available:
            return f"no: {self.reason} ({self.remedy})"
        return "yes" + "".join(f" {key}={value}" for key, value in self.as_dict().items())


def _fields(capabilities: Any) -> dict[str, Capability]:
    if capabilities is None:
        return {}
    if isinstance(capabilities, type) or not is_frozen_dataclass(type(capabilities)):
        raise TypeError(
            f"capabilities must be an instance of a frozen dataclass, got {type(capabilities).__name__}"
        )
    return {each.name: getattr(capabilities, each.name) for each in dataclasses.fields(capabilities)}


def is_frozen_dataclass(cls: object) -> bool:
    """Return whether ``cls`` is a frozen dataclass."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        return False
    return bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]  # typeshed leaves it out


def always_available() -> ProbeResult[Any]:
    """The probe of a plugin that needs nothing special and has no capabilities."""
    return ProbeResult.yes()


@dataclass(frozen=True, kw_only=True)
class Plugin(Generic[C]):
    """The base class of descriptors. Hooks return instances of its subclasses.

    A kind's owner derives the kind's descriptor from it, as a frozen dataclass: ``Plugin[StoreCapabilities]``, or
    ``Plugin[None]`` for a kind without capabilities. The subclass declares the type of ``create`` that the contract
    promises.
    """

    name: str
    """The name by which users select it; the same as its entry point's name."""

    api_version: int
    """The version of the kind's contract that the plugin was written for, such as ``1``."""

    create: Callable[..., Any]
    """Creates the plugin's object; called only when the plugin was selected."""

    probe: Callable[[], ProbeResult[C]] = always_available
    """Whether it can work on this machine."""

    summary: str = ""
    """One line for lists and help."""

    def __post_init__(self) -> None:
        problem = name_problem(self.name)
        if problem is not None:
            raise ValueError(f"{type(self).__name__}: {problem}")
        if not is_whole(self.api_version, 1):
            raise ValueError(
                f"{type(self).__name__} {self.name!r}: api_version must be a whole number from 1, got "
                f"{self.api_version!r}"
            )
        for what in ("create", "probe"):
            if not callable(getattr(self, what)):
                raise TypeError(f"{type(self).__name__} {self.name!r}: {what} must be callable")
        if not isinstance(self.summary, str) or "\n" in self.summary:
            raise ValueError(f"{type(self).__name__} {self.name!r}: summary must be one line of text")


@dataclass(frozen=True, kw_only=True)
class PolicyPlugin(Plugin[None]):
    """A supervision policy, selected by ``supervise="name"``; ``create()`` returns a :class:`mesh_core.policies.Policy`.

    >>> PolicyPlugin(name="shrug", api_version=1, create=lambda: Shrug(), summary="ignores every failure").name
    'shrug'
    """

    create: Callable[[], Policy]


@dataclass(frozen=True, kw_only=True)
class BypassPlugin(Plugin[None]):
    """A bypass: moves large parts of messages directly between hosts instead of through the host agents.

    ``create()`` returns a capsule as described in ``mesh_core/bypass.h``; see :func:`mesh_core.get_include`. It is called in
    each process that sends or receives a large part, on a thread reserved for that. A part that the bypass does not deliver
    travels through the agents.

    >>> BypassPlugin(name="pigeons", api_version=1, create=lambda: capsule, summary="takes its time").name
    'pigeons'
    """

    create: Callable[[], object]


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
class CommandPlugin(Plugin[None]):
    """A subcommand of ``mesh``; ``create()`` returns a :class:`Command`.

    >>> CommandPlugin(name="greet", api_version=1, create=lambda: Greet(), summary="say hello").name
    'greet'
    """

    create: Callable[[], Command]


Status: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a doctor check.

    >>> Finding(status="warn", detail="1,024 open files allowed", remedy="ulimit -n 65536").status
    'warn'
    """

    status: Status
    """``ok``; ``warn``: works, but slower or smaller than it could; ``fail``: something in Mesh will not work."""

    detail: str
    """What was found, on one line, with figures."""

    remedy: str = ""
    """What to do about it; required unless ``status`` is ``ok``."""

    def __post_init__(self) -> None:
        if self.status not in ("ok", "warn", "fail"):
            raise ValueError(f"a Finding's status must be 'ok', 'warn' or 'fail', got {self.status!r}")
        if not self.detail:
            raise ValueError("a Finding's detail must say what was found, got ''")
        if self.status != "ok" and not self.remedy:
            raise ValueError(f"the remedy of a Finding that is {self.status!r} must say what to do, got ''")


Check: TypeAlias = Callable[[], Iterable[Finding]]
"""What a doctor check's ``create`` returns: a function that is called once and returns one or more findings."""


@dataclass(frozen=True, kw_only=True)
class DoctorCheck(Plugin[None]):
    """A check for ``mesh doctor``; ``probe`` says whether it applies to this machine, ``create()`` returns the check.

    >>> def check():
    ...     yield Finding(status="ok", detail="all well")
    >>> DoctorCheck(name="health", api_version=1, create=lambda: check).name
    'health'
    """

    create: Callable[[], Check]
