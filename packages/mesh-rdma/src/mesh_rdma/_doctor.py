"""What `mesh doctor` says of transports."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_core.plugins import Check, DoctorCheck, Finding, hookimpl

if TYPE_CHECKING:
    from mesh_rdma._buffer import RDMABuffer
    from mesh_rdma._contract import TransportCapabilities

_SIZE = 64 * 1024
_LIMIT = 10.0
_OFFERS = f"""
import pickle, sys
from mesh_rdma import RDMABuffer
memory = bytearray({_SIZE})
buffer = RDMABuffer(memory)
sys.stdout.buffer.write(pickle.dumps(buffer))
sys.stdout.buffer.flush()
sys.stdin.read()
"""


@contextmanager
def _neighbour() -> Iterator[RDMABuffer]:
    """Memory of another process, which ends with this block."""
    command = [sys.executable, "-c", _OFFERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            buffer: RDMABuffer = pickle.load(process.stdout)
            yield buffer
        finally:
            process.kill()


def _row(name: str, can: TransportCapabilities) -> str:
    """One line of the matrix: what it can do, in columns."""
    does = [word for word, is_so in (("copies", can.copies), ("atomics", can.atomics)) if is_so]
    reaches = "any host" if can.remote else "this host"
    costs = "owner idle" if can.one_sided else "owner works"
    return f"{name:<8} {', '.join(does):<16} {reaches:<10} {costs:<12}"


def _try(name: str, can: TransportCapabilities, buffer: RDMABuffer) -> str:
    """Use it with another process, and say what was done."""
    from mesh_rdma._explain import explain

    candidates = explain(buffer, transport=name)
    if not candidates.candidates:
        raise ConnectionError(candidates.passed[name])
    sent, back = bytes(range(256)) * (_SIZE // 256), bytearray(_SIZE)
    buffer.write_from(sent, timeout=_LIMIT, transport=name).get(timeout=2 * _LIMIT)
    buffer.read_into(back, timeout=_LIMIT, transport=name).get(timeout=2 * _LIMIT)
    if back != sent:
        raise ConnectionError(
            "what was read is not what was written. Do not use it, and report it to its author"
        )
    done = "wrote 64 KiB to another process, and read them back"
    if can.atomics:
        buffer.fetch_add(1, timeout=_LIMIT, transport=name).get(timeout=2 * _LIMIT)
        done += ", added to a number there"
    return done


def _has_rdma_devices() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def _check() -> Iterable[Finding]:
    from mesh_core import MeshError
    from mesh_core.plugins import PluginManager
    from mesh_rdma import _ucx
    from mesh_rdma._contract import TRANSPORTS
    from mesh_rdma._transports import transports

    manager = PluginManager()
    with _neighbour() as buffer:
        for each in transports():
            row = _row(each.name, each.capabilities)
            if each.reason is not None:
                if (each.name == "ibverbs" and not _has_rdma_devices()) or (
                    each.name == "ucx" and _ucx.places() is None
                ):
                    # As on most machines: nothing is amiss.
                    yield Finding(status="ok", detail=f"{each.name:<8} not used: {each.reason}")
                    continue
                plugins = [plugin for plugin in manager.all(TRANSPORTS) if plugin.name == each.name]
                told = [manager.probe(plugin) for plugin in plugins]
                reason = next((result.reason for result in told if result.reason), each.reason)
                remedy = next((result.remedy for result in told if result.remedy), "report it to its author")
                detail = f"{each.name:<8} not here: {reason} (tried: its probe)"
                yield Finding(status="warn", detail=detail, remedy=remedy)
                continue
            try:
                done = _try(each.name, each.capabilities, buffer)
            except (MeshError, ConnectionError) as error:
                remedy = "transfers take the next transport by themselves; see explain(buffer) between two of your processes"
                yield Finding(status="warn", detail=f"{row} tried: {error}", remedy=remedy)
            else:
                yield Finding(status="ok", detail=f"{row} tried: {done}")


def _create() -> Check:
    return _check


RDMA = DoctorCheck(name="rdma", api_version=1, create=_create, summary="transports of RDMABuffer work here")


@hookimpl
def mesh_register_doctor_checks() -> Iterable[DoctorCheck]:
    """Offer the check."""
    yield RDMA
