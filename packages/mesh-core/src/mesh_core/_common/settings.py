"""What users can set, in one frozen dataclass; read in one place, :func:`current_settings`.

Later ones win: the defaults here, the environment (``MESH_SPIN_US=0``), :func:`configure` for the whole process,
:func:`configured` for a block.

SET-1: a value that is out of range or of the wrong type is rejected where it was given, and the error names that place.
SET-2: an unknown name is never ignored when it is likely to be a typo.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from mesh_core._common.errors import MeshError
from mesh_core._common.suggestions import did_you_mean, nearest

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

ENV_PREFIX: Final = "MESH_"
LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_SUFFIXES: Final = (("KIB", KIB), ("MIB", MIB), ("GIB", GIB), ("K", KIB), ("M", MIB), ("G", GIB), ("B", 1))
# A variable this similar to a setting's name is a typo. Others may belong to something else: Kubernetes, for one,
# sets MESH_PORT and MESH_SERVICE_HOST in every container beside a service called "mesh".
_TYPO_CUTOFF: Final = 0.85


class SettingsError(MeshError, ValueError):
    """A setting does not exist or cannot have that value; ``source`` says where it was given.

    >>> configure(spin_uss=10)
    Traceback (most recent call last):
    ...
    mesh_core._common.settings.SettingsError: configure(): no setting is called 'spin_uss'; did you mean 'spin_us'?
    """

    def __init__(self, message: str, *, setting: str = "", source: str = "", value: object = None) -> None:
        super().__init__(message)
        self.setting = setting
        self.source = source
        self.value = value


@dataclass(frozen=True, slots=True)
class _Number:
    """The range of numbers that a setting accepts."""

    kind: type[int] | type[float]
    low: float
    high: float
    unit: str

    def check(self, value: object) -> int | float:
        """Return the value as this kind of number, or raise ``ValueError`` saying what is wrong with it."""
        # One error type for both cases: the caller prefixes the setting's name and source.
        wanted = "a whole number" if self.kind is int else "a number"
        if isinstance(value, bool) or not isinstance(value, (int, self.kind)):
            raise ValueError(f"must be {wanted} of {self.unit}, got {type(value).__name__} {value!r}")
        if not self.low <= value <= self.high:
            raise ValueError(f"must be between {self.low:,} and {self.high:,} {self.unit}, got {value!r}")
        return self.kind(value)

    def parse(self, text: str) -> object:
        """Parse a variable's text: a number, for bytes also ``64KiB`` or ``256M``."""
        try:
            if self.kind is float:
                return float(text)
            plain = text.upper().replace("_", "")
            for suffix, factor in _SUFFIXES:
                if self.unit == "bytes" and plain.endswith(suffix):
                    return int(plain.removesuffix(suffix)) * factor
            return int(plain)
        except ValueError:
            hint = " (for example 65536, 64KiB, 256MiB)" if self.unit == "bytes" else ""
            raise ValueError(f"must be a number of {self.unit}{hint}, got {text!r}") from None


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of a few words; case does not matter."""

    words: tuple[str, ...]

    def check(self, value: object) -> str:
        """Return the word as spelled here, or raise ``ValueError``."""
        word = value.strip().upper() if isinstance(value, str) else None
        if word not in self.words:
            hint = did_you_mean(word, self.words) if word else ""
            raise ValueError(f"must be one of {', '.join(self.words)}, got {value!r}{hint}")
        return word

    def parse(self, text: str) -> object:
        """A variable's text is the word itself."""
        return text


_SWITCH_WORDS: Final[Mapping[str, bool]] = MappingProxyType(
    dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
)


@dataclass(frozen=True, slots=True)
class _Switch:
    """On or off."""

    def check(self, value: object) -> bool:
        """Return the value if it is a bool, or raise ``ValueError``."""
        if not isinstance(value, bool):
            raise ValueError(f"must be True or False, got {value!r}")
        return value

    def parse(self, text: str) -> object:
        """Parse a variable's text: ``1``, ``0``, or a common word for either."""
        word = text.lower()
        if word not in _SWITCH_WORDS:
            raise ValueError(f"must be 1 or 0, got {text!r}")
        return _SWITCH_WORDS[word]


_SECONDS: Final = _Number(float, 0.0, 86_400.0, "seconds")
_Rule: TypeAlias = _Number | _Choice | _Switch


def _setting(default: Any, rule: _Rule) -> Any:
    return field(default=default, metadata={"rule": rule})


def _memory() -> int:
    """Return this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of mesh-core. Immutable: :func:`configure` and :func:`configured` replace it.

    >>> Settings(spin_us=0).spin_us
    0.0
    >>> Settings(spawn_timeout=-1)
    Traceback (most recent call last):
    ...
    mesh_core._common.settings.SettingsError: Settings(): spawn_timeout must be between 0.0 and 86,400.0 seconds, got -1
    """

    spin_us: float = _setting(50.0, _Number(float, 0.0, 1e6, "microseconds"))
    """How long a waiting thread spins before it blocks, in microseconds; 0 blocks at once."""

    spawn_timeout: float = _setting(60.0, _SECONDS)
    """How long a new process may take to report for the first time, in seconds."""

    stop_timeout: float = _setting(5.0, _SECONDS)
    """How long a process may take to stop by itself before it is killed, in seconds."""

    sigterm_grace: float = _setting(8.0, _SECONDS)
    """How long the script may take to end in order after SIGTERM before it is killed, in seconds; 0 leaves SIGTERM alone."""

    preemption_grace: float = _setting(0.0, _SECONDS)
    """How long a host's agent continues after SIGTERM, in seconds, so that jobs can leave the host before it is taken away; 0
    ends it at once."""

    link_budget: int = _setting(256 * MIB, _Number(int, 64 * KIB, 2**62, "bytes"))
    """Bytes that may be queued for one process before its senders wait. Also limits the bytes of messages that a process's
    coroutines have sent and whose receivers have no room."""

    mailbox_budget: int = _setting(64 * MIB, _Number(int, 64 * KIB, 2**62, "bytes"))
    """Bytes that may wait in one actor's mailbox, from all senders together, before the senders wait."""

    reply_budget: int = _setting(0, _Number(int, 0, 2**62, "bytes"))
    """Bytes of unread replies that a process may hold. Further replies to it are dropped, and their calls fail with
    :class:`ReplyDropped`; 0 means three quarters of this machine's memory."""

    heartbeat_timeout: float = _setting(10.0, _Number(float, 0.05, 86_400.0, "seconds"))
    """How long another host may be silent before it is considered dead, in seconds."""

    fan_out: int = _setting(16, _Number(int, 1, 4096, "hosts"))
    """How many hosts each host relays a message for many hosts to."""

    ref_budget: int = _setting(0, _Number(int, 0, 2**62, "bytes"))
    """Bytes of values that a process may keep for references before ``put`` waits; 0 means an eighth of this machine's
    memory."""

    shm_budget: int = _setting(0, _Number(int, 0, 2**62, "bytes"))
    """Bytes of shared memory that messages on this machine may occupy; 0 means a quarter of its memory."""

    shm_threshold: int = _setting(64 * KIB, _Number(int, 1, 2**62, "bytes"))
    """Minimum size of a message part to travel through shared memory between processes of one host, in bytes."""

    shm_idle: float = _setting(10.0, _SECONDS)
    """How long a process keeps unused shared memory for its next messages, in seconds."""

    direct_links: int = _setting(64, _Number(int, 0, 4096, "links"))
    """To how many other processes of its host a process may have a direct link, by which messages go without passing the
    host's agent. Those that are not used give way; 0 sends all messages by way of the agent, which keeps causes before
    their effects among any processes."""

    bypass_threshold: int = _setting(MIB, _Number(int, 0, 2**62, "bytes"))
    """Minimum size of a message part to bypass the host agents on its way to a process of another host, if a package that
    moves them is installed, such as mesh-rdma. At least 256 KiB; 0 sends all parts through the agents."""

    log_level: str = _setting("INFO", _Choice(LOG_LEVELS))
    """The lowest level shown of the workers' and Mesh's own logging: DEBUG, INFO, WARNING, ERROR or CRITICAL."""

    log_window: float = _setting(3.0, _SECONDS)
    """How long identical lines of several workers are collected and shown as one, in seconds; 0 shows every line."""

    log_ignore_numbers: bool = _setting(False, _Switch())
    """Whether lines that differ only in numbers are also shown as one, with a note of how many there were."""

    log_records: bool = _setting(True, _Switch())
    """Whether workers' log records reach the handlers that the script set up for ``logging``; otherwise they are text."""

    log_wait: float = _setting(0.1, _SECONDS)
    """How long a result may wait until the script shows what the endpoint printed before it, in seconds; 0 never waits."""

    progress: str = _setting("AUTO", _Choice(("AUTO", "ON", "OFF")))
    """Whether a line on stderr says how far something is that takes long: AUTO, if stderr is a terminal; ON, also elsewhere; OFF,
    never."""

    post_mortem: bool = _setting(False, _Switch())
    """Whether an actor whose endpoint raised stops for ``mesh debug`` before the caller is notified."""

    def __post_init__(self) -> None:
        for name, rule in _rules().items():
            # Frozen for users; here the checked value replaces the given one (0 -> 0.0, "info" -> "INFO").
            object.__setattr__(self, name, _checked(rule, name, getattr(self, name), "Settings()"))

    @property
    def shm_bytes(self) -> int:
        """The shared-memory budget in bytes, with 0 resolved to a quarter of memory.

        >>> Settings(shm_budget=4096).shm_bytes
        4096
        """
        if self.shm_budget:
            return self.shm_budget
        return _memory() // 4

    @property
    def ref_bytes(self) -> int:
        """The budget of kept values in bytes, with 0 resolved to an eighth of memory.

        >>> Settings(ref_budget=1024).ref_bytes
        1024
        """
        return self.ref_budget or _memory() // 8

    @property
    def reply_bytes(self) -> int:
        """The budget of unread replies in bytes, with 0 resolved to three quarters of memory.

        >>> Settings(reply_budget=1024).reply_bytes
        1024
        """
        return self.reply_budget or _memory() // 4 * 3

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
        """Return the defaults, changed by the ``MESH_*`` variables in ``environ``.

        >>> Settings.from_env({"MESH_SHM_THRESHOLD": "1MiB"}).shm_threshold
        1048576
        """
        rules = _rules()
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX) or not text.strip():
                continue  # set to nothing is not set, as shells write it
            name = variable.removeprefix(ENV_PREFIX).lower()
            rule = rules.get(name)
            source = f"environment variable {variable}"
            if rule is None:
                match = nearest(name, rules, cutoff=_TYPO_CUTOFF)
                if match is not None:
                    right = ENV_PREFIX + match.upper()
                    raise SettingsError(
                        f"{source}: no setting is called {name!r}; did you mean {right}?",
                        setting=name,
                        source=source,
                        value=text,
                    )
                continue
            try:
                parsed = rule.parse(text.strip())
            except ValueError as error:
                raise SettingsError(
                    f"{source}: {name} {error}", setting=name, source=source, value=text
                ) from None
            values[name] = _checked(rule, name, parsed, source)
        return cls(**values)

    def changed(self, source: str = "changed()", /, **changes: Any) -> "Settings":
        """Return a copy with some settings changed; errors name ``source``.

        >>> Settings().changed(stop_timeout=1).stop_timeout
        1.0
        """
        rules = _rules()
        for name, value in changes.items():
            if name not in rules:
                raise SettingsError(
                    f"{source}: no setting is called {name!r}"
                    + (did_you_mean(name, rules) or f"; there are: {', '.join(rules)}"),
                    setting=name,
                    source=source,
                    value=value,
                )
            changes[name] = _checked(rules[name], name, value, source)
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by name.

        >>> Settings().as_dict()["spin_us"]
        50.0
        """
        return asdict(self)


def _rules() -> dict[str, _Rule]:
    return {each.name: each.metadata["rule"] for each in fields(Settings)}


def _checked(rule: _Rule, name: str, value: object, source: str) -> int | float | str:
    try:
        return rule.check(value)
    except ValueError as error:
        raise SettingsError(f"{source}: {name} {error}", setting=name, source=source, value=value) from None


class SettingsHolder:
    """Holds settings: one for the process, and one for each open :func:`configured` block.

    The environment is read on first use, not at import: a script may still set variables after importing.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        # Two threads that configure at once must not lose each other's change.
        self._lock = threading.Lock()

    def get(self) -> Settings:
        """Return the settings held; the first call reads the environment."""
        settings = self._settings
        if settings is None:
            with self._lock:
                settings = self._settings = self._settings or Settings.from_env(os.environ)
        return settings

    def change(self, source: str, changes: dict[str, Any]) -> Settings:
        """Change the settings held, and return them."""
        self.get()
        with self._lock:
            self._settings = settings = self.get().changed(source, **changes)
            return settings


# The process's own holder, and the one that replaces it in an open `configured` block.
_PROCESS: Final = SettingsHolder()
_BLOCK: Final[ContextVar[SettingsHolder | None]] = ContextVar("mesh_settings", default=None)


def _holder() -> SettingsHolder:
    return _BLOCK.get() or _PROCESS


def current_settings() -> Settings:
    """Return the settings in force here. The rest of Mesh reads settings only through this function.

    >>> current_settings().stop_timeout
    5.0
    """
    return _holder().get()


def configure(**changes: Any) -> Settings:
    """Change settings for the whole process, or inside :func:`configured` for the rest of the block.

    >>> with configured():
    ...     configure(spin_us=0).spin_us
    0.0
    """
    return _holder().change("configure()", changes)


@contextmanager
def configured(**changes: Any) -> Iterator[Settings]:
    """Change settings inside a ``with`` block, for this thread or task and the tasks it starts.

    >>> with configured(stop_timeout=0.5) as settings:
    ...     current_settings() is settings
    True
    >>> current_settings().stop_timeout
    5.0
    """
    settings = current_settings().changed("configured()", **changes)
    token = _BLOCK.set(SettingsHolder(settings))
    try:
        yield settings
    finally:
        _BLOCK.reset(token)


def runtime_options(settings: Settings) -> dict[str, Any]:
    """Return the options to create a runtime with."""
    return {
        "spin_us": settings.spin_us,
        "ref_budget": settings.ref_bytes,
        "link_budget": settings.link_budget,
        "mailbox_budget": settings.mailbox_budget,
        "reply_budget": settings.reply_bytes,
        "shm_budget": settings.shm_bytes,
        "shm_threshold": settings.shm_threshold,
        "shm_idle": settings.shm_idle,
        "direct_links": settings.direct_links,
    }
