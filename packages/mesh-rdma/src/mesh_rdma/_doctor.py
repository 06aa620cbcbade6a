"""The checks of `mesh doctor` for transports."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mesh_core import python_command
from mesh_core.plugins import Check, DoctorCheck, Finding, hookimpl
from mesh_rdma import _cuda, _ucx

if TYPE_CHECKING:
    from mesh_rdma._buffer import RDMABuffer
    from mesh_rdma._contract import TransportCapabilities

_SIZE = 64 * 1024
_LIMIT = 10.0
_MEMORY = {
    "host": f"memory = bytearray({_SIZE})",
    "gpu": f"from mesh_rdma._gpu import GpuMemory; memory = GpuMemory({_SIZE})[:]",
}
_OFFERS = """
import pickle, sys
from mesh_rdma import RDMABuffer
{memory}
buffer = RDMABuffer(memory)
sys.stdout.buffer.write(pickle.dumps(buffer))
sys.stdout.buffer.flush()
sys.stdin.read()
"""


@contextmanager
def _neighbour(kind: str) -> Iterator[RDMABuffer]:
    """Memory of another process, which ends with this block."""
    command = python_command(_OFFERS.format(memory=_MEMORY[kind]))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            try:
                buffer: RDMABuffer = pickle.load(process.stdout)
            except EOFError:
                raise ConnectionError("another process that was to offer memory has failed") from None
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
    """Use it with another process, and report the result."""
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


def _try_gpu(name: str, can: TransportCapabilities) -> str:
    """The same with memory of a GPU there, into memory of the processor here."""
    with _neighbour("gpu") as buffer:
        return _try(name, can, buffer).replace("to another process", "to memory of a GPU of another process")


def _is_not_wanted(name: str) -> bool:
    """Return whether it is normal that a transport cannot be used, as on most machines."""
    if name == "ibverbs":
        folder = Path("/sys/class/infiniband")
        return not (folder.is_dir() and any(folder.iterdir()))
    if name == "cuda":
        return not Path("/dev/nvidiactl").exists() and _cuda.library() is None
    return name == "ucx" and _ucx.places() is None


def _check() -> Iterable[Finding]:
    from mesh_core import MeshError
    from mesh_core.plugins import PluginManager
    from mesh_rdma._contract import TRANSPORTS
    from mesh_rdma._transports import transports

    manager = PluginManager()
    with _neighbour("host") as buffer:
        for each in transports():
            row = _row(each.name, each.capabilities)
            if each.reason is not None:
                if _is_not_wanted(each.name):
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
                can = each.capabilities
                done = _try_gpu(each.name, can) if each.name == "cuda" else _try(each.name, can, buffer)
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
