"""What is installed, from the distributions' metadata alone: nothing of a plugin is imported here."""

import importlib.metadata
import re
from dataclasses import dataclass, field
from typing import Final

from mesh_core._errors import PluginLoadError
from mesh_core.plugins._descriptors import Plugin
from mesh_core.plugins._kinds import KINDS, PluginKind

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
    """The plugins found, and the distributions whose metadata could not be read."""

    entries: tuple[PluginEntry, ...]
    unreadable: tuple[PluginLoadError, ...]

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
    seen: set[str] = set()
    for found in importlib.metadata.distributions():
        text = found.read_text("entry_points.txt") or ""
        if not any(f"[{group}]" in text for group in groups):
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
    entries.sort(key=lambda each: (each.group, each.name, each.distribution))
    return Scan(tuple(entries), tuple(unreadable))


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
