"""The hooks a plugin implements. They return descriptors and do nothing else: none is called on a message or data path.

A hook is called when a plugin of its kind is looked up by name, or listed. Every result is looked at; of two
distributions that offer one name, neither is chosen, and the error names both.
"""

from collections.abc import Iterable
from typing import Final

import pluggy

from mesh_core.plugins._descriptors import (
    CommandPlugin,
    DoctorCheck,
    LauncherPlugin,
    PolicyPlugin,
    TransportPlugin,
)

PROJECT: Final = "mesh"

hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of one of the hooks below."""


@hookspec
def mesh_register_transports() -> Iterable[TransportPlugin]:  # type: ignore[empty-body]
    """Offer data-plane transports; entry-point group ``mesh.transports``.

    Example::

        @hookimpl
        def mesh_register_transports():
            yield TransportPlugin(name="foo", api_version=1, probe=probe, create=create)
    """


@hookspec
def mesh_register_launchers() -> Iterable[LauncherPlugin]:  # type: ignore[empty-body]
    """Offer ways to get hosts; entry-point group ``mesh.launchers``.

    Example::

        @hookimpl
        def mesh_register_launchers():
            yield LauncherPlugin(name="foo", api_version=1, probe=probe, create=create)
    """


@hookspec
def mesh_register_policies() -> Iterable[PolicyPlugin]:  # type: ignore[empty-body]
    """Offer supervision policies; entry-point group ``mesh.supervision``.

    Example::

        @hookimpl
        def mesh_register_policies():
            yield PolicyPlugin(name="two_for_one", api_version=1, create=create)
    """


@hookspec
def mesh_register_commands() -> Iterable[CommandPlugin]:  # type: ignore[empty-body]
    """Offer subcommands of ``mesh``; entry-point group ``mesh.commands``.

    Example::

        @hookimpl
        def mesh_register_commands():
            yield CommandPlugin(name="greet", api_version=1, create=Greet, summary="say hello")
    """


@hookspec
def mesh_register_doctor_checks() -> Iterable[DoctorCheck]:  # type: ignore[empty-body]
    """Offer checks for ``mesh doctor``; entry-point group ``mesh.doctor``.

    Example::

        @hookimpl
        def mesh_register_doctor_checks():
            yield DoctorCheck(name="licence", api_version=1, create=lambda: check)
    """
