"""Find installed plugins from the distributions' metadata alone, without importing them."""

import importlib.metadata
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from mesh_core._common.errors import PluginError, PluginLoadError
from mesh_core._common.suggestions import did_you_mean, nearest
from mesh_core.plugins._kinds import KINDS_GROUP, PREFIX, PluginKind
from mesh_core.plugins._owners import GROUP_OWNERS

SWITCHES: Final = "MESH_PLUGINS"
"""The variable that switches plugins off."""
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
UNNAMED: Final = "(a distribution without a name)"


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One entry point of one installed distribution.

    >>> PluginEntry("mesh.commands", "greet", "mesh_greet.plugin", "mesh-greet", "1.0").origin
    'mesh-greet 1.0'
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str
    point: importlib.metadata.EntryPoint | None = field(default=None, compare=False, repr=False)
    """The entry point itself, for loading it."""

    @property
    def origin(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution} {self.version}"

    def error(self, said: str, *, kind: str, cause: str, remedy: str, name: str = "") -> PluginLoadError:
        """Make an error about this entry point. ``name`` replaces its own name."""
        return PluginLoadError(
            f"{said}; {remedy}",
            kind=kind,
            name=name or self.name,
            distribution=self.distribution,
            version=self.version,
            cause=cause,
            remedy=remedy,
        )


@dataclass(frozen=True, slots=True)
class Scan:
    """All entry points in groups that begin with ``mesh.``, and the problems among them."""

    entries: tuple[PluginEntry, ...]
    """Sorted by group, name and distribution; includes groups without a declared kind."""
    unreadable: tuple[PluginLoadError, ...]
    """An error for each distribution whose metadata cannot be read."""
    misnamed: tuple[PluginLoadError, ...]
    """An error for each group of a distribution that no installed or known package declares; ``name`` is the group."""
    ownerless: tuple[PluginLoadError, ...]
    """An error for each group of a distribution whose kind is declared by a package that is not installed."""
    switched_off: tuple[PluginLoadError, ...] = ()
    """An error for each entry point that the user has switched off; its kind is its group."""

    def of(self, kind: PluginKind[Any]) -> tuple[PluginEntry, ...]:
        """Return the entries of a kind, sorted by name, then distribution."""
        return self.under(kind.group)

    def under(self, group: str) -> tuple[PluginEntry, ...]:
        """Return the entries of a group, sorted by name, then distribution."""
        return tuple(each for each in self.entries if each.group == group)


def switched_off() -> frozenset[str]:
    """Return the names of plugins that the environment switches off: ``MESH_PLUGINS=-name``, several separated by commas."""
    names = [each.strip() for each in os.environ.get(SWITCHES, "").replace(",", " ").split()]
    for each in names:
        if not each.startswith("-") or not each[1:]:
            raise PluginError(
                f"{SWITCHES} must list plugins to switch off, each with a leading '-', such as -{each.lstrip('-') or 'name'}; "
                f"got {each!r}",
                remedy="plugins are on unless they are switched off",
            )
    return frozenset(each[1:] for each in names)


def scan(off: Collection[str] = ()) -> Scan:
    """Search all installed distributions for entry-point groups of Mesh, and leave out plugins of these names.

    With the standard look-up, one damaged entry_points.txt makes the whole search fail; here it is one error, and the other
    distributions are still found.
    """
    entries: list[PluginEntry] = []
    unreadable: list[PluginLoadError] = []
    seen: set[str] = set()
    for found in importlib.metadata.distributions():
        text = found.read_text("entry_points.txt") or ""
        if f"[{PREFIX}" not in text:
            continue
        name, version = _identity(found)
        distribution = found
        if name != UNNAMED:
            if normal(name) in seen:
                continue
            seen.add(normal(name))
            # If two distributions on the path have one name, Python imports from the first, so its metadata counts.
            distribution = importlib.metadata.distribution(name)
            name, version = _identity(distribution)
        try:
            points = list(distribution.entry_points)
        except Exception as error:  # noqa: BLE001 - the parser may raise anything
            cause = f"{type(error).__name__}: {error}"
            unreadable.append(
                PluginLoadError(
                    f"the entry points of {name} {version} cannot be read: {cause}; reinstall {name}",
                    distribution=name,
                    version=version,
                    cause=cause,
                    remedy=f"reinstall {name}",
                )
            )
            continue
        entries += [
            PluginEntry(each.group, each.name, each.value, name, version, each)
            for each in points
            if each.group.startswith(PREFIX)
        ]
    entries.sort(key=lambda each: (each.group, each.name, each.distribution))
    left_out = [each for each in entries if each.name in off and each.group != KINDS_GROUP]
    entries = [each for each in entries if each not in left_out]
    declared = {PREFIX + each.name for each in entries if each.group == KINDS_GROUP}
    stray: dict[tuple[str, str], list[PluginEntry]] = {}
    for each in entries:
        if each.group not in declared and each.group != KINDS_GROUP:
            stray.setdefault((each.distribution, each.group), []).append(each)
    owners = {
        group: GROUP_OWNERS.get(group) or _missing(each, declared) for (_, group), each in stray.items()
    }
    return Scan(
        tuple(entries),
        tuple(unreadable),
        tuple(_misnamed(each, declared) for each in stray.values() if owners[each[0].group] is None),
        tuple(
            _ownerless(each, owner) for each in stray.values() if (owner := owners[each[0].group]) is not None
        ),
        tuple(_off(each) for each in left_out),
    )


def _off(entry: PluginEntry) -> PluginLoadError:
    return entry.error(
        f"{entry.name} of {entry.origin} is switched off",
        kind=entry.group,
        cause=f"{SWITCHES} switches it off",
        remedy=f"remove -{entry.name} from {SWITCHES}",
    )


def _missing(entries: list[PluginEntry], declared: set[str]) -> str | None:
    """Return the package that most probably declares a group: the one that the plugins' distribution needs and that is missing."""
    if (
        nearest(entries[0].group.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in declared])
        is not None
    ):
        return None
    for each in _requirements(entries[0].distribution):
        try:
            importlib.metadata.distribution(each)
        except importlib.metadata.PackageNotFoundError:
            return each
    return None


def _requirements(distribution: str) -> list[str]:
    """Return the names of what a distribution always needs."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    named = [_NAME.match(line) for line in lines if "extra ==" not in line]
    return [each.group() for each in named if each is not None]


def _misnamed(entries: list[PluginEntry], declared: set[str]) -> PluginLoadError:
    group, distribution = entries[0].group, entries[0].distribution
    # Compare without the common prefix, which would make any two names similar.
    endings = {each.removeprefix(PREFIX): each for each in sorted({*declared, KINDS_GROUP, *GROUP_OWNERS})}
    match = nearest(group.removeprefix(PREFIX), endings)
    known = ", ".join(endings.values())
    cause = f"no installed package declares the entry-point group {group!r}" + (
        did_you_mean(endings[match], [endings[match]]) if match else f"; known groups are: {known}"
    )
    remedy = f"tell the author of {distribution}; Mesh does not see what is in it ({_names(entries)})"
    return _group_error(entries[0], cause, remedy)


def _ownerless(entries: list[PluginEntry], owner: str) -> PluginLoadError:
    cause = (
        f"the kind of {_names(entries)} (entry-point group {entries[0].group!r}) is declared by {owner}, "
        "which is not installed or does not declare it"
    )
    return _group_error(entries[0], cause, f"pip install --upgrade {owner}")


def _names(entries: list[PluginEntry]) -> str:
    return ", ".join(sorted(each.name for each in entries))


def _group_error(entry: PluginEntry, cause: str, remedy: str) -> PluginLoadError:
    return entry.error(f"{entry.origin}: {cause}", kind="group", name=entry.group, cause=cause, remedy=remedy)


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    try:
        metadata = distribution.metadata
        if "Name" in metadata and "Version" in metadata:
            return metadata["Name"], metadata["Version"]
    except Exception:  # noqa: BLE001 - no METADATA file, or a damaged one; it is needed for messages only
        pass
    return UNNAMED, "(no version)"


def normal(name: str) -> str:
    """Normalize a distribution's name, as installers do."""
    return re.sub(r"[-_.]+", "-", name).lower()
