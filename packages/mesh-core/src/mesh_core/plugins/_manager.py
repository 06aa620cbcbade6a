"""Finding plugins by name and loading the one that was asked for.

MAN-1: making a manager, and asking for names, imports nothing of any plugin.
MAN-2: selecting one plugin imports that plugin and no other.
MAN-3: a plugin that does not load is remembered, warned of once, and an error for whoever selects it;
       it is never an error for anyone else.
"""

import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NoReturn, TypeAlias, TypeVar

import pluggy

from mesh_core._errors import PluginError, PluginLoadError
from mesh_core._nearest import did_you_mean, nearest
from mesh_core.plugins import _specs
from mesh_core.plugins._descriptors import Capability, Plugin, ProbeResult, name_problem
from mesh_core.plugins._kinds import KINDS, PluginKind
from mesh_core.plugins._scan import PluginEntry, Scan, scan

P = TypeVar("P", bound=Plugin)
PluginStatus: TypeAlias = Literal["available", "unavailable", "broken"]

OWN_DISTRIBUTION: Final = "mesh-core"


@dataclass(frozen=True, kw_only=True)
class PluginReport:
    """What is known of one plugin after trying it: one line of ``mesh plugins``.

    >>> PluginReport(kind="command", name="greet", distribution="mesh-greet", version="1.0", status="available").status
    'available'
    """

    kind: str
    name: str
    distribution: str
    version: str
    status: PluginStatus
    api_version: int | None = None
    summary: str = ""
    capabilities: Mapping[str, Capability] = field(default_factory=dict)
    reason: str = ""
    remedy: str = ""


class PluginManager:
    """The plugins of this environment. An object: make one where it is needed, pass it on, let it go.

    ``warn`` is told of each broken plugin once; by default it is logged.

    >>> from mesh_core.plugins import COMMANDS
    >>> manager = PluginManager()
    >>> "doctor" in manager.names(COMMANDS)
    True
    >>> manager.get(COMMANDS, "doctor").summary
    'check that this machine is ready for Mesh'
    """

    def __init__(self, *, warn: Callable[[PluginLoadError], None] | None = None) -> None:
        self._warn = warn if warn is not None else _log
        # Loading imports the plugin, which may ask this manager for another on the same thread.
        self._lock = threading.RLock()
        self._loaded: dict[PluginEntry, Plugin] = {}
        self._broken: dict[PluginEntry, PluginLoadError] = {}

    @cached_property
    def _scan(self) -> Scan:
        found = scan()
        for error in (*found.unreadable, *found.misnamed):
            self._warn(error)
        return found

    @cached_property
    def _pluggy(self) -> pluggy.PluginManager:
        hooks = pluggy.PluginManager(_specs.PROJECT)
        hooks.add_hookspecs(_specs)
        return hooks

    def entries(self, kind: PluginKind[Plugin]) -> tuple[PluginEntry, ...]:
        """Every entry point of a kind, also those that share a name or will not load; from metadata alone."""
        return self._scan.of(kind)

    def names(self, kind: PluginKind[Plugin]) -> tuple[str, ...]:
        """The names that can be asked for, in order; from metadata alone."""
        return tuple(dict.fromkeys(each.name for each in self.entries(kind)))

    def get(self, kind: PluginKind[P], name: str, *, distribution: str | None = None) -> P:
        """The plugin of that name, imported now if it was not yet.

        Raises :class:`PluginError` if there is none, or two, and :class:`PluginLoadError` if it does not load.
        ``distribution`` picks one where several offer the name.
        """
        found = [each for each in self.entries(kind) if each.name == name]
        if distribution is not None:
            found = [each for each in found if each.distribution == distribution]
        if not found:
            self._refuse_unknown(kind, name, distribution)
        if len(found) > 1:
            raise _conflict(kind, name, found)
        return self._load(kind, found[0])

    def all(self, kind: PluginKind[P]) -> tuple[P, ...]:
        """Every plugin of a kind that loads, by name; of those that do not, a warning the first time."""
        return tuple(plugin for _, plugin in self._each(kind) if not isinstance(plugin, PluginLoadError))

    def probe(self, plugin: Plugin) -> ProbeResult:
        """Ask a plugin whether it can work here. A probe that breaks its promise not to raise is a no."""
        try:
            result: object = plugin.probe()
        except Exception as error:  # noqa: BLE001 - a probe is somebody else's code
            said = f"its probe raised {type(error).__name__}: {error}"
        else:
            if isinstance(result, ProbeResult):
                return result
            said = f"its probe returned {type(result).__name__}, not ProbeResult"
        return ProbeResult.no(said, remedy=f"report this to the author of {self._origin(plugin)}")

    def survey(self, kinds: Iterable[PluginKind[Plugin]] = KINDS) -> tuple[PluginReport, ...]:
        """Load and probe every plugin, and report on each; the broken ones are in the report, and warned of once.

        What cannot be read at all has the kind ``metadata``, and a group of entry points that Mesh does not have ``group``.
        """
        reports = [
            PluginReport(
                kind=error.kind or "metadata",
                name=error.name,
                distribution=error.distribution,
                version=error.version,
                status="broken",
                reason=error.cause,
                remedy=error.remedy,
            )
            for error in (*self._scan.unreadable, *self._scan.misnamed)
        ]
        for kind in kinds:
            reports += [self._report(kind, entry, plugin) for entry, plugin in self._each(kind)]
        return tuple(reports)

    def origin(self, kind: PluginKind[Plugin], name: str) -> str:
        """The distribution, or distributions, that offer a name, for messages; from metadata alone."""
        return " and ".join(each.origin for each in self.entries(kind) if each.name == name)

    def _each(self, kind: PluginKind[P]) -> Iterator[tuple[PluginEntry, P | PluginLoadError]]:
        entries = self.entries(kind)
        for entry in entries:
            rivals = [each for each in entries if each.name == entry.name]
            try:
                plugin = self._load(kind, entry) if len(rivals) == 1 else None
            except PluginLoadError as error:
                yield entry, error
            else:
                yield entry, plugin or self._remember(entry, _conflict(kind, entry.name, rivals))

    def _load(self, kind: PluginKind[P], entry: PluginEntry) -> P:
        with self._lock:
            known = self._loaded.get(entry)
            if known is not None:
                assert isinstance(known, kind.descriptor)
                return known
            if entry in self._broken:
                # Raised anew without the frames of the last time, which would pile up and hold what they refer to.
                raise self._broken[entry].with_traceback(None)
            try:
                plugin = self._offered(kind, entry)
            except PluginLoadError as error:
                raise self._remember(entry, error) from error.__cause__
            self._loaded[entry] = plugin
            return plugin

    def _remember(self, entry: PluginEntry, error: PluginLoadError) -> PluginLoadError:
        with self._lock:
            # A conflict is the same text for each of the rivals, and is said once.
            said = any(str(error) == str(each) for each in self._broken.values())
            self._broken[entry] = error
            if not said:
                self._warn(error)
            return error

    def _offered(self, kind: PluginKind[P], entry: PluginEntry) -> P:
        """Import the entry point's module, register it, call its hook, and return the descriptor of that name."""
        problem = name_problem(entry.name)
        if problem is not None:
            raise _load_error(kind, entry, f"bad name: {problem}", _tell_author(entry))
        with _blamed(kind, entry, "its import raised", f"reinstall or uninstall {entry.distribution}"):
            module = _import(entry)
        with _blamed(kind, entry, "its hooks are not as Mesh wants them", _tell_author(entry)):
            self._register(module, entry)
        offered = self._call(kind, entry, module)
        chosen = [each for each in offered if each.name == entry.name]
        if len(chosen) != 1:
            names = ", ".join(sorted(repr(each.name) for each in offered)) or "nothing"
            what = "never" if not chosen else "more than once"
            raise _load_error(
                kind,
                entry,
                f"{kind.hook} yields {entry.name!r} {what}; it yields {names}",
                _tell_author(entry),
            )
        if chosen[0].api_version > kind.api_version:
            cause = (
                f"it was written for version {chosen[0].api_version} of the {kind.word} contract; "
                f"{OWN_DISTRIBUTION} {_own_version()} speaks version {kind.api_version}"
            )
            raise _load_error(
                kind, entry, cause, f"upgrade {OWN_DISTRIBUTION}, or install an older {entry.distribution}"
            )
        return chosen[0]

    def _register(self, module: object, entry: PluginEntry) -> None:
        if self._pluggy.is_registered(module):
            return  # one module may stand behind several entry points
        try:
            self._pluggy.register(module, name=f"{entry.group}:{entry.distribution}:{entry.name}")
            hooks = [each.hook for each in KINDS]
            for caller in self._pluggy.get_hookcallers(module) or []:
                # pluggy takes an implementation of a hook that nobody specified for one that is still to come.
                if caller.spec is None:
                    hint = did_you_mean(caller.name, hooks) or f"; the hooks are {', '.join(hooks)}"
                    raise TypeError(f"there is no hook {caller.name!r}{hint}")
        except BaseException:
            # Else the next entry point of this module would find it registered, and half checked.
            self._pluggy.unregister(module)
            raise

    def _call(self, kind: PluginKind[P], entry: PluginEntry, module: object) -> list[P]:
        others = [each for each in self._pluggy.get_plugins() if each is not module]
        hook = self._pluggy.subset_hook_caller(kind.hook, remove_plugins=others)
        if not any(each.plugin is module for each in hook.get_hookimpls()):
            raise _load_error(
                kind, entry, f"{entry.value} has no @hookimpl named {kind.hook}", _tell_author(entry)
            )
        with _blamed(kind, entry, f"{kind.hook} raised", _tell_author(entry)):
            # Iterating belongs inside: a hook that is a generator runs only now.
            yielded = [each for result in hook() for each in _listed(kind, result)]
        offered: list[P] = []
        for each in yielded:
            if not isinstance(each, kind.descriptor):
                cause = f"{kind.hook} yields {kind.descriptor.__name__}s; got {type(each).__name__} {_short(each)}"
                raise _load_error(kind, entry, cause, _tell_author(entry))
            offered.append(each)
        return offered

    def _report(
        self, kind: PluginKind[Plugin], entry: PluginEntry, plugin: Plugin | PluginLoadError
    ) -> PluginReport:
        if isinstance(plugin, PluginLoadError):
            return PluginReport(
                kind=kind.word,
                name=entry.name,
                distribution=entry.distribution,
                version=entry.version,
                status="broken",
                reason=plugin.cause,
                remedy=plugin.remedy,
            )
        result = self.probe(plugin)
        return PluginReport(
            kind=kind.word,
            name=entry.name,
            distribution=entry.distribution,
            version=entry.version,
            status="available" if result else "unavailable",
            api_version=plugin.api_version,
            summary=plugin.summary,
            capabilities=dict(result.capabilities),
            reason=result.reason,
            remedy=result.remedy,
        )

    def _origin(self, plugin: Plugin) -> str:
        return next(
            (entry.origin for entry, each in self._loaded.items() if each is plugin), repr(plugin.name)
        )

    def _refuse_unknown(self, kind: PluginKind[Plugin], name: str, distribution: str | None) -> NoReturn:
        names = self.names(kind)
        match = nearest(name, names)
        where = f" from {distribution}" if distribution is not None else ""
        known = f"installed are: {', '.join(names)}" if names else f"no {kind.word} is installed"
        remedy = f"use {match!r}" if match is not None else "install the package that offers it"
        raise PluginError(
            f"no {kind.word} is called {name!r}{where}{did_you_mean(name, names)} ({known}; `mesh plugins` lists everything)",
            kind=kind.word,
            name=name,
            remedy=remedy,
        )


def _import(entry: PluginEntry) -> object:
    assert entry.point is not None, "entries made by scan() hold their entry point"
    if entry.point.pattern.match(entry.value) is None:
        raise ValueError(f"the entry point {entry.value!r} is not of the form 'package.module'")
    return entry.point.load()


def _listed(kind: PluginKind[Plugin], result: object) -> list[object]:
    if isinstance(result, Iterable) and not isinstance(result, (str, bytes, Mapping)):
        return list(result)
    wanted = kind.descriptor.__name__
    if isinstance(result, kind.descriptor):
        raise TypeError(f"it returned one {wanted}; yield it, or return a list of them")
    raise TypeError(f"it returned {type(result).__name__} {_short(result)}, not an iterable of {wanted}")


@contextmanager
def _blamed(kind: PluginKind[Plugin], entry: PluginEntry, what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a plugin's own code raises into the error that names the plugin."""
    try:
        yield
    # SystemExit: a module that calls sys.exit() while it is imported must not end the user's program.
    except (Exception, SystemExit) as error:
        raise _load_error(kind, entry, f"{what}: {type(error).__name__}: {error}", remedy) from error


def _load_error(kind: PluginKind[Plugin], entry: PluginEntry, cause: str, remedy: str) -> PluginLoadError:
    return PluginLoadError(
        f"{kind.word} {entry.name!r} of {entry.origin} cannot be loaded: {cause}; {remedy}",
        kind=kind.word,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        cause=cause,
        remedy=remedy,
    )


def _conflict(kind: PluginKind[Plugin], name: str, rivals: list[PluginEntry]) -> PluginLoadError:
    """The error for a name that is offered more than once."""
    origins = list(dict.fromkeys(each.origin for each in rivals))
    if len(origins) > 1:
        cause = (
            f"{' and '.join(origins)} all offer it"
            if len(origins) > 2
            else f"both {' and '.join(origins)} offer it"
        )
        strangers = [each.distribution for each in rivals if each.distribution != OWN_DISTRIBUTION]
        remedy = f"uninstall {' or '.join(dict.fromkeys(strangers))}"
    else:
        cause = f"{origins[0]} offers it {len(rivals)} times"
        remedy = _tell_author(rivals[0])
    return PluginLoadError(
        f"{kind.word} {name!r} cannot be chosen: {cause}; {remedy}",
        kind=kind.word,
        name=name,
        distribution=", ".join(dict.fromkeys(each.distribution for each in rivals)),
        version=", ".join(each.version for each in rivals),
        cause=cause,
        remedy=remedy,
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version(OWN_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"  # run from its sources


def _tell_author(entry: PluginEntry) -> str:
    return f"report this to the author of {entry.distribution}"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - so is a repr
        return "(whose repr raises)"
    return text if len(text) <= 60 else text[:57] + "..."


def _log(error: PluginLoadError) -> None:
    logging.getLogger("mesh_core.plugins").warning("%s", error)
