"""The engine's own transports as plugins, so that they are listed with all others."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_rdma import _cuda, _ucx
from mesh_rdma._contract import NativeTransport, TransportCapabilities, TransportPlugin
from mesh_rdma._verbs import stand_in

REMEDY = (
    "mount /proc and allow process_vm_readv and process_vm_writev (in Docker: --cap-add=SYS_PTRACE or another seccomp "
    "profile), and the loopback interface"
)
REMEDIES = {
    "ibverbs": (
        "install the driver of the adapter (in Debian and Ubuntu the packages rdma-core, ibverbs-providers and libibverbs1), give its "
        "port a cable and an address, and let this user, or container, use /dev/infiniband and lock memory (ulimit -l)"
    ),
    "cuda": _cuda.REMEDY,
    "ucx": _ucx.REMEDY,
}
"""Of those for which it is another one."""


def _probe(name: str) -> ProbeResult[TransportCapabilities]:
    from mesh_rdma._transports import transports

    (found,) = (each for each in transports() if each.name == name)
    if found.reason is None:
        return ProbeResult.yes(found.capabilities)
    return ProbeResult.no(found.reason, remedy=REMEDIES.get(name, REMEDY))


def _plugin(name: str, summary: str) -> TransportPlugin:
    create, probe = partial(NativeTransport, name), partial(_probe, name)
    return TransportPlugin(name=name, api_version=1, create=create, probe=probe, summary=summary)


SHM = _plugin("shm", "memory of processes of one host, by the kernel's calls or mapped")
CUDA = _plugin("cuda", "memory of GPUs of one host, mapped by CUDA IPC")
TCP = _plugin("tcp", "a native thread of the owner; encrypted between hosts")
IBVERBS = _plugin("ibverbs", "RDMA devices of both ends, over InfiniBand or RoCE")
UCX = _plugin("ucx", "one-sided operations of libucp, where it is switched on")


@hookimpl
def mesh_register_transports() -> Iterable[TransportPlugin]:
    """All of them."""
    yield SHM
    yield CUDA
    yield TCP
    yield stand_in() or IBVERBS
    yield UCX
