"""Labels and resources of hosts: agents are started with them, and hosts are selected by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_core._common.checks import is_number
from mesh_core._common.codes import HostState
from mesh_core._common.errors import MeshError
from mesh_core._geometry.location import evenly
from mesh_core._native import introductions, roll

if TYPE_CHECKING:
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._process.process import Process

# The same limits as in Rust, where receivers check them too.
MOST = 64
LONGEST_NAME = 64
LONGEST_VALUE = 256

# How many hosts an error names.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a mesh, as :meth:`HostMesh.select` passes it to its predicate.

    >>> from mesh_core.testing import LocalCluster
    >>> with LocalCluster(hosts=2, resources=[{"gpus": 8}, {}]) as cluster, cluster.attach() as hosts:
    ...     hosts.initialized.get(timeout=60)
    ...     hosts.select(lambda host: host.resources.get("gpus", 0) >= 8).names
    ['host-0']
    """

    name: str
    """Its name."""
    address: str
    """The address at which it was attached; empty if it dialed in."""
    labels: Mapping[str, str]
    """The labels that its agent was started with."""
    resources: Mapping[str, float]
    """The resources that its agent was started with; ``"cpus"`` is how many CPUs it may use, unless that was given too."""


def check_labels(labels: object) -> dict[str, str]:
    """Check the labels of a host and return them."""
    checked = _named(labels, "labels", "zone", "'a'")
    for name, value in checked.items():
        if not isinstance(value, str):
            raise TypeError(f"label {name!r} must be a string, got {value!r}")
        if len(value.encode()) > LONGEST_VALUE or not value.isprintable():
            raise ValueError(
                f"label {name!r} must be a printable text of at most {LONGEST_VALUE} bytes, got {value[:80]!r}"
            )
    return checked


def check_resources(resources: object) -> dict[str, float]:
    """Check the resources of a host and return them."""
    checked = _named(resources, "resources", "gpus", "8")
    for name, amount in checked.items():
        if not is_number(amount):
            raise TypeError(f"resource {name!r} must be a number, got {amount!r}")
        if not math.isfinite(amount) or amount < 0:
            raise ValueError(f"resource {name!r} must be a number of at least 0, got {amount!r}")
    return {name: float(amount) for name, amount in checked.items()}


def _named(given: object, what: str, name: str, value: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a mapping such as {{'{name}': {value}}}, got {given!r}")
    if len(given) > MOST:
        raise ValueError(f"{what} must be at most {MOST}, got {len(given)}")
    for key in given:
        if not isinstance(key, str) or not key or len(key.encode()) > LONGEST_NAME or not key.isprintable():
            raise ValueError(
                f"names of {what} must be printable texts of at most {LONGEST_NAME} bytes, got {key!r}"
            )
    return dict(given)


def traits(hosts: HostMesh) -> list[Host]:
    """Return the hosts of a mesh, in order; raise if one has not reported its labels yet."""
    return _traits_and_dead(hosts)[0]


def _traits_and_dead(hosts: HostMesh) -> tuple[list[Host], list[int]]:
    process, numbers = hosts._process, hosts._numbers
    if not process.identity.is_script:
        raise MeshError(
            "only the script that has attached hosts knows their labels and resources; ask there, and "
            "pass the result"
        )
    said, dead = introduced(process, numbers) if process.ask_traits is None else process.ask_traits(numbers)
    found: list[Host] = []
    waited: list[str] = []
    for number, name, address, one in zip(numbers, hosts.names, hosts.addresses, said, strict=True):
        if one is None and number not in dead and number != process.identity.host_no:
            waited.append(name)
        cpus, labels, resources = one or (0, [], [])
        amounts = {"cpus": float(cpus), **dict(resources)} if one else {}
        found.append(Host(name, address, dict(labels), amounts))
    if waited:
        raise MeshError(
            f"the labels and resources of {_listed(waited)} are not known yet; wait for `initialized` of {hosts!r} first"
        )
    return found, dead


Said = tuple[int, list[tuple[str, str]], list[tuple[str, float]]]
"""CPUs, labels and resources of a host."""


def introduced(process: Process, numbers: Sequence[int]) -> tuple[list[Said | None], list[int]]:
    """Return what these hosts reported about themselves, and which of them are gone. Works only at the controller."""
    dead = [
        host
        for host, _, _, _, state, *_ in roll(process.runtime)
        if state in (HostState.DEAD, HostState.STOPPED)
    ]
    return introductions(process.runtime, list(numbers)), dead


def select(
    hosts: HostMesh, predicate: Callable[[Host], object] | None, labels: Mapping[str, str]
) -> HostMesh:
    """See :meth:`HostMesh.select`."""
    if predicate is None and not labels:
        raise TypeError(
            "select() needs labels such as zone='a', or a function of a host such as "
            "lambda host: host.resources['gpus'] >= 8"
        )
    if predicate is not None and not callable(predicate):
        raise TypeError(f"select() takes a function of a host, or labels by name, got {predicate!r}")
    check_labels(labels)
    all_of, dead = _traits_and_dead(hosts)
    numbers = hosts._numbers
    chosen = [
        (number, host)
        for number, host in zip(numbers, all_of, strict=True)
        if number not in dead
        and all(host.labels.get(name) == value for name, value in labels.items())
        and (predicate is None or predicate(host))
    ]
    if not chosen:
        raise ValueError(_nobody(hosts, all_of, labels))
    found = [number for number, _ in chosen]
    if len(found) == len(numbers):
        return hosts
    labels_of = list(hosts._view.extent.labels)
    label = labels_of[0] if len(labels_of) == 1 else "hosts"
    regular = evenly(found)
    if len(regular) == 1 and not hosts._location.is_joined:
        return hosts._with_region(regular[0].rename(hosts=label) if label != "hosts" else regular[0])
    return hosts._listed(found, label, hosts.name, hosts._location.names)


def _nobody(hosts: HostMesh, all_of: list[Host], labels: Mapping[str, str]) -> str:
    from mesh_core._common.suggestions import did_you_mean

    known = sorted({name for host in all_of for name in host.labels})
    for name, value in labels.items():
        if name not in known:
            there = f"; there are: {', '.join(known)}" if known else "; none was started with --label"
            return f"no host of {hosts!r} has a label {name!r}{did_you_mean(name, known) or there}"
        values = sorted({host.labels[name] for host in all_of if name in host.labels})
        if value not in values:
            return f"no host of {hosts!r} has the label {name}={value!r}; there are: {', '.join(values[:_SHOWN])}"
    return f"no host of {hosts!r} that is attached and not dead was selected"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
