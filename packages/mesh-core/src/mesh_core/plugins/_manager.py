"""Find plugins by name and load the selected one.

MAN-1: creating a manager and asking for names imports no plugin.
MAN-2: selecting a plugin imports that plugin and no other.
MAN-3: a plugin that does not load is remembered and warned about once. It is an error only for code that selects it.
MAN-4: code that holds a kind can use it without a declaration. Declarations under ``mesh.kinds`` are imported only to list
       everything, or to check a hook that is unknown so far.
"""

import importlib.metadata
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any, Final, Literal, NoReturn, TypeAlias, TypeVar

import pluggy

from mesh_core._common.errors import PluginError, PluginLoadError
from mesh_core._common.suggestions import did_you_mean, nearest
from mesh_core.plugins._descriptors import Capability, Plugin, ProbeResult, always_available, name_problem
from mesh_core.plugins._kinds import (
    BYPASSES,
    COMMANDS,
    DOCTOR_CHECKS,
    KINDS_GROUP,
    POLICIES,
    PREFIX,
    PluginKind,
)
from mesh_core.plugins._owners import NAME_OWNERS
from mesh_core.plugins._probes import PROBES
from mesh_core.plugins._scan import PluginEntry, Scan, normal, scan, switched_off
from mesh_core.plugins._specs import PROJECT, spec_of

Kind: TypeAlias = PluginKind[Plugin[Any]]
P = TypeVar("P", bound=Plugin[Any])
PluginStatus: TypeAlias = Literal["available", "unavailable", "broken"]

OWN_DISTRIBUTION: Final = "mesh-core"


@dataclass(frozen=True, kw_only=True)
class PluginReport:
    """What is known about a plugin after loading and probing it: one line of ``mesh plugins``.

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
    """The installed plugins. There is no global manager: create one where you need it.

    ``warn`` is called once for each broken plugin; by default it is logged, once in a process.

    >>> from mesh_core.plugins import COMMANDS
    >>> manager = PluginManager()
    >>> "doctor" in manager.names(COMMANDS)
    True
    >>> manager.get(COMMANDS, "doctor").summary
    'check that this machine is ready for Mesh'
    """

    def __init__(self, *, warn: Callable[[PluginLoadError], None] | None = None) -> None:
        self._warn = warn if warn is not None else _LOG.warn
        # Reentrant: a plugin may ask this manager for another plugin while it is imported.
        self._lock = threading.RLock()
        self._loaded: dict[PluginEntry, tuple[Kind, Plugin[Any]]] = {}
        self._modules: dict[PluginEntry, object] = {}
        self._broken: dict[PluginEntry, PluginLoadError] = {}
        self._shadowed: dict[PluginEntry, PluginLoadError] = {}
        """Those whose names belong to others. They can still be selected by their distribution."""
        self._hooks = pluggy.PluginManager(PROJECT)
        self._specified: set[str] = set()
        for kind in (BYPASSES, COMMANDS, DOCTOR_CHECKS, POLICIES):
            self._specify(kind)

    @cached_property
    def _scan(self) -> Scan:
        found = scan(switched_off())
        for error in (*found.unreadable, *found.misnamed):
            self._warn(error)
        return found

    @cached_property
    def _declared(self) -> tuple[tuple[tuple[PluginEntry, Kind], ...], tuple[PluginLoadError, ...]]:
        """The declared kinds that load, and the errors of those that do not."""
        # mesh-core's own come first, so that a declaration that takes one of its names or hooks is the one that fails.
        entries = sorted(
            self._scan.under(KINDS_GROUP), key=lambda each: each.distribution != OWN_DISTRIBUTION
        )
        found: list[tuple[PluginEntry, Kind]] = []
        errors: list[PluginLoadError] = []
        for entry in entries:
            rivals = [each for each in entries if each.name == entry.name]
            try:
                if len(rivals) > 1 and entry.distribution != OWN_DISTRIBUTION:
                    raise _conflict("kind", entry.name, rivals)
                found.append((entry, self._declaration(entry, [kind for _, kind in found])))
            except PluginLoadError as error:
                errors.append(self._remember(entry, error))
        found.sort(key=lambda each: each[1].group)
        return tuple(found), tuple(errors)

    def kinds(self) -> tuple[Kind, ...]:
        """Return all declared kinds that load, ordered by group; imports the modules that declare them."""
        with self._lock:
            return tuple(kind for _, kind in self._declared[0])

    def entries(self, kind: Kind | None = None) -> tuple[PluginEntry, ...]:
        """Return all entry points of a kind, including those that share a name or do not load; from metadata alone.

        Without a kind, all entry points in groups that begin with ``mesh.``.
        """
        return self._scan.entries if kind is None else self._scan.of(kind)

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Return the names that can be selected, in order; from metadata alone."""
        return tuple(dict.fromkeys(each.name for each in self.entries(kind)))

    def get(self, kind: PluginKind[P], name: str, *, distribution: str | None = None) -> P:
        """Return the plugin of this name, importing it if necessary.

        Raises :class:`PluginError` if there is none, and :class:`PluginLoadError` if there are several or it does not load.
        ``distribution`` picks one if several distributions offer the name.
        """
        found = [each for each in self.entries(kind) if each.name == name]
        if distribution is not None:
            found = [each for each in found if each.distribution == distribution]
        if not found:
            self._refuse_unknown(kind, name, distribution)
        chosen = found[0] if len(found) == 1 else _owners(kind, name, found)
        if chosen is None:
            raise _conflict(kind.word, name, found)
        for each in found:
            if each is not chosen:
                self._shadow(kind, each, chosen)
        return self._load(kind, chosen)

    def all(self, kind: PluginKind[P]) -> tuple[P, ...]:
        """Return all plugins of a kind that load, ordered by name; warn once about those that do not."""
        return tuple(plugin for _, plugin in self._each(kind) if not isinstance(plugin, PluginLoadError))

    def probe(self, plugin: Plugin[Any]) -> ProbeResult[Any]:
        """Ask a plugin whether it can work here. If its probe breaks its contract, such as by raising, the answer is no.

        A plugin that a manager has loaded is asked once in a process. A probe that takes more than half a second is warned of.
        """
        entry = next((entry for entry, (_, each) in self._loaded.items() if each is plugin), None)
        module = None if entry is None else self._modules.get(entry)
        if entry is None or not isinstance(module, ModuleType):
            return self._ask(plugin)
        return PROBES.ask(module, entry, self._loaded[entry][0].word, lambda: self._ask(plugin))

    def _ask(self, plugin: Plugin[Any]) -> ProbeResult[Any]:
        try:
            result: object = plugin.probe()
        except Exception as error:  # noqa: BLE001 - a probe is foreign code
            reason = f"its probe raised {type(error).__name__}: {error}"
        else:
            if not isinstance(result, ProbeResult):
                reason = f"its probe must return a ProbeResult, got {type(result).__name__}"
            else:
                problem = self._capability_problem(plugin, result)
                if problem is None:
                    return result
                reason = problem
        return ProbeResult.no(reason, remedy=f"report this to the author of {self._origin(plugin)}")

    def survey(self, kinds: Iterable[Kind] | None = None) -> tuple[PluginReport, ...]:
        """Load and probe every plugin, and report on each, including broken ones, which are also warned about once.

        Without ``kinds``, covers all declared kinds. Unreadable metadata is reported as the kind ``metadata``, a declaration
        that does not load as ``kind``, and a group that no installed package declares as ``group``.
        """
        kinds = None if kinds is None else tuple(kinds)
        undeclared = () if kinds is not None else self._declared[1]
        reports = [_broken(error) for error in (*self._scan.unreadable, *self._scan.misnamed, *undeclared)]
        reports += [_broken(error, "unavailable") for error in self._scan.ownerless]
        words = {kind.group: kind.word for kind in (self.kinds() if kinds is None else kinds)}
        reports += [
            replace(_broken(error, "unavailable"), kind=words[error.kind])
            for error in self._scan.switched_off
            if error.kind in words
        ]
        declared = {kind.name for kind in self.kinds()}
        for error in {each.name: each for each in undeclared if each.name not in declared}.values():
            reports += [
                _broken(
                    _load_error(error.name, entry, f"its kind does not load: {error.cause}", error.remedy)
                )
                for entry in self._scan.under(PREFIX + error.name)
            ]
        for kind in self.kinds() if kinds is None else kinds:
            reports += [self._report(kind, entry, plugin) for entry, plugin in self._each(kind)]
        return tuple(reports)

    def origin(self, kind: Kind, name: str) -> str:
        """Return the distributions that offer a name, for messages; from metadata alone."""
        return " and ".join(each.origin for each in self.entries(kind) if each.name == name)

    def _each(self, kind: PluginKind[P]) -> Iterator[tuple[PluginEntry, P | PluginLoadError]]:
        entries = self.entries(kind)
        for entry in entries:
            rivals = [each for each in entries if each.name == entry.name]
            chosen = entry if len(rivals) == 1 else _owners(kind, entry.name, rivals)
            if chosen is None:
                yield entry, self._remember(entry, _conflict(kind.word, entry.name, rivals))
            elif chosen is not entry:
                yield entry, self._shadow(kind, entry, chosen)
            else:
                try:
                    plugin = self._load(kind, entry)
                except PluginLoadError as error:
                    yield entry, error
                else:
                    yield entry, plugin

    def _load(self, kind: PluginKind[P], entry: PluginEntry) -> P:
        with self._lock:
            known = self._loaded.get(entry)
            if known is not None:
                assert isinstance(known[1], kind.descriptor)
                return known[1]
            if entry in self._broken:
                # Without the traceback of the last time, whose frames would accumulate and keep objects alive.
                raise self._broken[entry].with_traceback(None)
            try:
                plugin = self._offered(kind, entry)
            except PluginLoadError as error:
                raise self._remember(entry, error) from error.__cause__
            self._loaded[entry] = (kind, plugin)
            return plugin

    def _shadow(self, kind: Kind, entry: PluginEntry, chosen: PluginEntry) -> PluginLoadError:
        with self._lock:
            if entry not in self._shadowed:
                self._shadowed[entry] = _shadowed(kind, entry, chosen)
                self._warn(self._shadowed[entry])
            return self._shadowed[entry]

    def _remember(self, entry: PluginEntry, error: PluginLoadError) -> PluginLoadError:
        with self._lock:
            # A conflict has the same text for each of the rivals: warn once.
            is_known = any(str(error) == str(each) for each in self._broken.values())
            self._broken[entry] = error
            if not is_known:
                self._warn(error)
            return error

    def _offered(self, kind: PluginKind[P], entry: PluginEntry) -> P:
        """Import the entry point's module, register it, call its hook, and return the descriptor of this name."""
        problem = name_problem(entry.name)
        if problem is not None:
            raise _load_error(kind.word, entry, f"bad name: {problem}", _tell_author(entry))
        with _blamed(kind.word, entry, "its import raised", _reinstall(entry)):
            module = self._modules[entry] = _import(entry)
        with _blamed(kind.word, entry, "its hooks do not fit", _tell_author(entry)):
            self._specify(kind)
            self._register(module, entry)
        offered = self._call(kind, entry, module)
        chosen = [each for each in offered if each.name == entry.name]
        if len(chosen) != 1:
            names = ", ".join(sorted(repr(each.name) for each in offered)) or "nothing"
            what = "never" if not chosen else "more than once"
            raise _load_error(
                kind.word,
                entry,
                f"{kind.hook} yields {entry.name!r} {what}; it yields {names}",
                _tell_author(entry),
            )
        self._check_contract(kind, entry, chosen[0])
        return chosen[0]

    def _check_contract(self, kind: Kind, entry: PluginEntry, plugin: Plugin[Any]) -> None:
        if plugin.api_version > kind.api_version:
            cause = (
                f"it was written for version {plugin.api_version} of the {kind.word} contract; "
                f"{kind.owner} {_version_of(kind.owner)} speaks version {kind.api_version}"
            )
            remedy = f"upgrade {kind.owner}, or install an older {entry.distribution}"
            raise _load_error(kind.word, entry, cause, remedy)
        if kind.capabilities is not None and plugin.probe is always_available:
            cause = f"it needs a probe that returns {kind.capabilities.__name__}, and has none"
            raise _load_error(kind.word, entry, cause, _tell_author(entry))

    def _capability_problem(self, plugin: Plugin[Any], result: ProbeResult[Any]) -> str | None:
        kind = next((kind for kind, each in self._loaded.values() if each is plugin), None)
        if kind is None or not result.available:
            return None
        if isinstance(result.capabilities, kind.capabilities or type(None)):
            return None
        wanted = "no capabilities" if kind.capabilities is None else kind.capabilities.__name__
        return f"its probe must return {wanted}, got {type(result.capabilities).__name__}"

    def _declaration(self, entry: PluginEntry, others: list[Kind]) -> Kind:
        """Import and check the kind that an entry point of ``mesh.kinds`` refers to."""
        with _blamed("kind", entry, "its import raised", _reinstall(entry)):
            kind = _import(entry)
        problem = None
        if not isinstance(kind, PluginKind):
            problem = f"{entry.value} must be a PluginKind, got {type(kind).__name__}"
        elif kind.name != entry.name:
            problem = f"the entry point's name must be {kind.name!r}, for the group {kind.group!r}"
        elif normal(kind.owner) != normal(entry.distribution):
            problem = f"its owner must be {entry.distribution!r}, got {kind.owner!r}"
        else:
            rival = next((each for each in others if each.hook == kind.hook), None)
            if rival is None:
                return kind
            problem = f"{rival.owner} has a hook of the name {kind.hook!r}, for the kind {rival.word!r}"
        raise _load_error("kind", entry, problem, _tell_author(entry))

    def _specify(self, kind: Kind) -> None:
        """Add a kind's hook to pluggy."""
        if kind.hook not in self._specified:
            self._hooks.add_hookspecs(spec_of(kind))
            self._specified.add(kind.hook)

    def _register(self, module: object, entry: PluginEntry) -> None:
        if self._hooks.is_registered(module):
            return  # several entry points may name one module
        try:
            self._hooks.register(module, name=f"{entry.group}:{entry.distribution}:{entry.name}")
            if self._unspecified(module):
                # Hooks of kinds that nobody has asked for yet.
                for each in self.kinds():
                    self._specify(each)
            for name in self._unspecified(module):
                # pluggy accepts an implementation of an unknown hook, as one that may be specified later.
                known = sorted(self._specified)
                hint = did_you_mean(name, known) or f"; the hooks are {', '.join(known)}"
                raise TypeError(f"there is no hook {name!r}{hint}")
        except BaseException:
            # Otherwise the module's next entry point would find it registered, though not fully checked.
            self._hooks.unregister(module)
            raise

    def _unspecified(self, module: object) -> list[str]:
        return [each.name for each in self._hooks.get_hookcallers(module) or [] if each.spec is None]

    def _call(self, kind: PluginKind[P], entry: PluginEntry, module: object) -> list[P]:
        others = [each for each in self._hooks.get_plugins() if each is not module]
        hook = self._hooks.subset_hook_caller(kind.hook, remove_plugins=others)
        if not any(each.plugin is module for each in hook.get_hookimpls()):
            raise _load_error(
                kind.word, entry, f"{entry.value} has no @hookimpl named {kind.hook}", _tell_author(entry)
            )
        with _blamed(kind.word, entry, f"{kind.hook} raised", _tell_author(entry)):
            # Iterate inside the block: a hook that is a generator runs only now.
            yielded = [each for result in hook() for each in _listed(kind, result)]
        offered: list[P] = []
        for each in yielded:
            if not isinstance(each, kind.descriptor):
                cause = f"{kind.hook} yields {kind.descriptor.__name__}s; got {type(each).__name__} {_short(each)}"
                raise _load_error(kind.word, entry, cause, _tell_author(entry))
            offered.append(each)
        return offered

    def _report(self, kind: Kind, entry: PluginEntry, plugin: Plugin[Any] | PluginLoadError) -> PluginReport:
        if isinstance(plugin, PluginLoadError):
            error = _load_error(kind.word, entry, plugin.cause, plugin.remedy)
            return _broken(error, "unavailable" if entry in self._shadowed else "broken")
        result = self.probe(plugin)
        return PluginReport(
            kind=kind.word,
            name=entry.name,
            distribution=entry.distribution,
            version=entry.version,
            status="available" if result else "unavailable",
            api_version=plugin.api_version,
            summary=plugin.summary,
            capabilities=result.as_dict(),
            reason=result.reason,
            remedy=result.remedy,
        )

    def _origin(self, plugin: Plugin[Any]) -> str:
        return next(
            (entry.origin for entry, (_, each) in self._loaded.items() if each is plugin), repr(plugin.name)
        )

    def _refuse_unknown(self, kind: Kind, name: str, distribution: str | None) -> NoReturn:
        for error in self._scan.switched_off:
            if error.name == name and error.kind == kind.group and distribution in (None, error.distribution):
                raise PluginError(
                    f"{kind.word} {name!r} of {error.distribution} {error.version} is switched off; {error.remedy}",
                    kind=kind.word,
                    name=name,
                    remedy=error.remedy,
                )
        owner = NAME_OWNERS.get((kind.group, name))
        if owner is not None and distribution in (None, owner):
            _refuse_known(kind, name, owner)
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


def _refuse_known(kind: Kind, name: str, owner: str) -> NoReturn:
    """Raise the error for a name that is missing but known to be in a package of Mesh."""
    try:
        version = importlib.metadata.version(owner)
    except importlib.metadata.PackageNotFoundError:
        state, remedy = "which is not installed", f"pip install {owner}"
    else:
        state, remedy = (
            f"and the installed {owner} {version} does not offer it",
            f"pip install --upgrade {owner}",
        )
    raise PluginError(
        f"{kind.word} {name!r} is in {owner}, {state}: {remedy}", kind=kind.word, name=name, remedy=remedy
    )


def _broken(error: PluginLoadError, status: PluginStatus = "broken") -> PluginReport:
    return PluginReport(
        kind=error.kind or "metadata",
        name=error.name,
        distribution=error.distribution,
        version=error.version,
        status=status,
        reason=error.cause,
        remedy=error.remedy,
    )


def _import(entry: PluginEntry) -> object:
    assert entry.point is not None, "entries made by scan() hold their entry point"
    if entry.point.pattern.match(entry.value) is None:
        raise ValueError(f"the entry point {entry.value!r} is not of the form 'package.module'")
    return entry.point.load()


def _listed(kind: Kind, result: object) -> list[object]:
    if isinstance(result, Iterable) and not isinstance(result, (str, bytes, Mapping)):
        return list(result)
    wanted = kind.descriptor.__name__
    if isinstance(result, kind.descriptor):
        raise TypeError(f"it returned one {wanted}; yield it, or return a list of them")
    raise TypeError(f"it must return an iterable of {wanted}, got {type(result).__name__} {_short(result)}")


@contextmanager
def _blamed(word: str, entry: PluginEntry, what: str, remedy: str) -> Iterator[None]:
    """Turn anything that a plugin's code raises into an error that names the plugin."""
    try:
        yield
    # SystemExit: a module that calls sys.exit() while it is imported must not end the user's program.
    except (Exception, SystemExit) as error:
        raise _load_error(word, entry, f"{what}: {type(error).__name__}: {error}", remedy) from error


def _load_error(word: str, entry: PluginEntry, cause: str, remedy: str) -> PluginLoadError:
    said = f"{word} {entry.name!r} of {entry.origin} cannot be loaded: {cause}"
    return entry.error(said, kind=word, cause=cause, remedy=remedy)


def _owners(kind: Kind, name: str, rivals: list[PluginEntry]) -> PluginEntry | None:
    """Return the one of several plugins of a name that has a right to it: that of the kind's owner, or of a known package."""
    owner = normal(NAME_OWNERS.get((kind.group, name), kind.owner))
    own = [each for each in rivals if normal(each.distribution) == owner]
    return own[0] if len(own) == 1 else None


def _shadowed(kind: Kind, entry: PluginEntry, chosen: PluginEntry) -> PluginLoadError:
    """Make the error for a plugin whose name belongs to another package."""
    cause = f"the name belongs to {chosen.distribution}, whose {kind.word} is used"
    remedy = f"tell the author of {entry.distribution} to choose another name"
    said = f"{kind.word} {entry.name!r} of {entry.origin} is not used: {cause}"
    return entry.error(said, kind=kind.word, cause=cause, remedy=remedy)


def _conflict(word: str, name: str, rivals: list[PluginEntry]) -> PluginLoadError:
    """Make the error for a name that is offered more than once."""
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
        f"{word} {name!r} cannot be chosen: {cause}; {remedy}",
        kind=word,
        name=name,
        distribution=", ".join(dict.fromkeys(each.distribution for each in rivals)),
        version=", ".join(each.version for each in rivals),
        cause=cause,
        remedy=remedy,
    )


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"  # run from its sources


def _reinstall(entry: PluginEntry) -> str:
    return f"reinstall or uninstall {entry.distribution}"


def _tell_author(entry: PluginEntry) -> str:
    return f"report this to the author of {entry.distribution}"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a repr is foreign code
        return "(whose repr raises)"
    return text if len(text) <= 60 else text[:57] + "..."


class _Log:
    """Logs what is wrong with a plugin once in a process, however many managers meet it."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, error: PluginLoadError) -> None:
        """Log it, unless the same was logged before."""
        text = str(error)
        if text not in self._said:
            self._said.add(text)
            logging.getLogger("mesh_core.plugins").warning("%s", text)


_LOG: Final = _Log()
