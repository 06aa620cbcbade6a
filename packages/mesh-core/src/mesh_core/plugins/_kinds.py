"""Kinds of plugins. The package that defines a kind's contract owns the kind and declares it under ``mesh.kinds``."""

import re
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from mesh_core._common.checks import is_whole
from mesh_core.plugins._descriptors import (
    BypassPlugin,
    CommandPlugin,
    DoctorCheck,
    Plugin,
    PolicyPlugin,
    is_frozen_dataclass,
)

P_co = TypeVar("P_co", bound=Plugin[Any], covariant=True)

PREFIX: Final = "mesh."
"""The prefix of all entry-point groups of Mesh."""
KINDS_GROUP: Final = "mesh.kinds"
"""The entry-point group under which packages declare kinds."""

_GROUP: Final = re.compile(r"mesh\.[a-z][a-z0-9_]*")
_HOOK: Final = re.compile(r"mesh_[a-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind(Generic[P_co]):
    """One kind of plugin.

    A package declares a kind by an entry point in the group ``mesh.kinds``. The entry point's name is the kind's group
    without ``mesh.``, and its value refers to the ``PluginKind``.

    >>> from collections.abc import Callable
    >>> from dataclasses import dataclass
    >>> from mesh_core.plugins import Plugin, PluginKind
    >>> @dataclass(frozen=True)
    ... class StoreCapabilities:
    ...     durable: bool
    >>> @dataclass(frozen=True, kw_only=True)
    ... class StorePlugin(Plugin[StoreCapabilities]):
    ...     create: Callable[[str], dict[str, bytes]]
    >>> STORES = PluginKind(
    ...     word="store",
    ...     group="mesh.stores",
    ...     hook="mesh_register_stores",
    ...     descriptor=StorePlugin,
    ...     api_version=1,
    ...     capabilities=StoreCapabilities,
    ...     owner="mesh-stores",
    ... )
    >>> STORES.plural, STORES.name
    ('stores', 'stores')
    """

    word: str
    """What messages call one plugin of this kind."""
    group: str
    """The entry-point group of its plugins, such as ``mesh.stores``."""
    hook: str
    """The hook that returns its descriptors, such as ``mesh_register_stores``."""
    descriptor: type[P_co]
    """The class of its descriptors, a subclass of :class:`Plugin`."""
    api_version: int
    """The newest version of its contract that the installed owner supports."""
    owner: str
    """The distribution that defines the contract."""
    capabilities: type | None = None
    """The frozen dataclass of capabilities that a probe returns; ``None`` if plugins of this kind have none."""

    def __post_init__(self) -> None:
        if not self.word or "\n" in self.word:
            raise ValueError(f"word of a plugin kind must be one line of text, got {self.word!r}")
        if _GROUP.fullmatch(self.group) is None or self.group == KINDS_GROUP:
            raise ValueError(
                f"group of the kind {self.word!r} must be 'mesh.' and a lower-case identifier other than 'kinds', "
                f"got {self.group!r}"
            )
        if _HOOK.fullmatch(self.hook) is None:
            raise ValueError(
                f"hook of the kind {self.word!r} must be 'mesh_' and lower-case letters, digits or '_', got {self.hook!r}"
            )
        if not (isinstance(self.descriptor, type) and issubclass(self.descriptor, Plugin)):
            raise TypeError(
                f"descriptor of the kind {self.word!r} must be a subclass of Plugin, got {self.descriptor!r}"
            )
        version: object = self.api_version
        if not is_whole(version, 1):
            raise ValueError(
                f"api_version of the kind {self.word!r} must be a whole number from 1, got {version!r}"
            )
        if not self.owner:
            raise ValueError(f"owner of the kind {self.word!r} must be the name of a distribution, got ''")
        if self.capabilities is not None and not is_frozen_dataclass(self.capabilities):
            raise TypeError(
                f"capabilities of the kind {self.word!r} must be a frozen dataclass, got {self.capabilities!r}"
            )

    @property
    def name(self) -> str:
        """The group without ``mesh.``: the name of the entry point that declares the kind."""
        return self.group.removeprefix(PREFIX)

    @property
    def plural(self) -> str:
        """The plural of :attr:`word`."""
        if self.word.endswith("y"):
            return self.word.removesuffix("y") + "ies"
        return self.word + ("es" if self.word.endswith("s") else "s")


BYPASSES: Final = PluginKind(
    word="bypass",
    group="mesh.bypasses",
    hook="mesh_register_bypasses",
    descriptor=BypassPlugin,
    api_version=1,
    owner="mesh-core",
)
POLICIES: Final = PluginKind(
    word="policy",
    group="mesh.policies",
    hook="mesh_register_policies",
    descriptor=PolicyPlugin,
    api_version=1,
    owner="mesh-core",
)
COMMANDS: Final = PluginKind(
    word="command",
    group="mesh.commands",
    hook="mesh_register_commands",
    descriptor=CommandPlugin,
    api_version=1,
    owner="mesh-core",
)
DOCTOR_CHECKS: Final = PluginKind(
    word="doctor check",
    group="mesh.doctor",
    hook="mesh_register_doctor_checks",
    descriptor=DoctorCheck,
    api_version=1,
    owner="mesh-core",
)
