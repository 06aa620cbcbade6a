"""What is installed, from the distributions' metadata alone: nothing of a plugin is imported here."""

import importlib.metadata
import re
from dataclasses import dataclass, field
from typing import Final

from mesh_core._errors import PluginLoadError
from mesh_core._nearest import did_you_mean, nearest
from mesh_core.plugins._descriptors import Plugin
from mesh_core.plugins._kinds import KINDS, PluginKind

# What Mesh's groups begin with.
_PREFIX: Final = "mesh."

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
    """The entry point itself, for the one who loads it."""

    @property
    def origin(self) -> str:
        """The distribution and its version, as messages name it."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Scan:
    """The plugins found, the distributions whose metadata could not be read, and groups that are none of Mesh's."""

    entries: tuple[PluginEntry, ...]
    unreadable: tuple[PluginLoadError, ...]
    misnamed: tuple[PluginLoadError, ...]
    """What stands under a group that begins as Mesh's do and does not exist; ``name`` is the group."""

    def of(self, kind: PluginKind[Plugin]) -> tuple[PluginEntry, ...]:
        """The entries of one kind, by name, then distribution."""
        return tuple(each for each in self.entries if each.group == kind.group)


def scan() -> Scan:
    """Look through every installed distribution for Mesh's entry-point groups.

    One distribution with a damaged entry_points.txt makes the standard look-up fail for all of them; here it is
    one error, and the others are found.
    """
    groups = {kind.group for kind in KINDS}
    entries: list[PluginEntry] = []
    unreadable: list[PluginLoadError] = []
    misnamed: list[PluginLoadError] = []
    seen: set[str] = set()
    for found in importlib.metadata.distributions():
        text = found.read_text("entry_points.txt") or ""
        if f"[{_PREFIX}" not in text:
            continue
        name, version = _identity(found)
        distribution = found
        if name != UNNAMED:
            if _normal(name) in seen:
                continue
            seen.add(_normal(name))
            # Where two of one name are on the path, Python imports from the first: so its metadata counts.
            distribution = importlib.metadata.distribution(name)
            name, version = _identity(distribution)
        try:
            points = list(distribution.entry_points)
        except Exception as error:  # noqa: BLE001 - the parser raises what it stumbles over
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
            if each.group in groups
        ]
        unknown = sorted({each.group for each in points if each.group.startswith(_PREFIX)} - groups)
        misnamed += [
            _misnamed(group, [each.name for each in points if each.group == group], name, version)
            for group in unknown
        ]
    entries.sort(key=lambda each: (each.group, each.name, each.distribution))
    return Scan(tuple(entries), tuple(unreadable), tuple(misnamed))


def _misnamed(group: str, names: list[str], distribution: str, version: str) -> PluginLoadError:
    # The part that they all begin with makes any two alike.
    endings = {kind.group.removeprefix(_PREFIX): kind.group for kind in KINDS}
    match = nearest(group.removeprefix(_PREFIX), endings)
    known = ", ".join(endings.values())
    cause = f"Mesh has no entry-point group {group!r}" + (
        did_you_mean(endings[match], [endings[match]]) if match else f"; there are: {known}"
    )
    remedy = f"tell the author of {distribution}; what stands there ({', '.join(sorted(names))}) is not seen by Mesh"
    return PluginLoadError(
        f"{distribution} {version}: {cause}; {remedy}",
        kind="group",
        name=group,
        distribution=distribution,
        version=version,
        cause=cause,
        remedy=remedy,
    )


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    try:
        metadata = distribution.metadata
        if "Name" in metadata and "Version" in metadata:
            return metadata["Name"], metadata["Version"]
    except Exception:  # noqa: BLE001 - no METADATA file, or a damaged one; it is needed for messages only
        pass
    return UNNAMED, "(no version)"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
