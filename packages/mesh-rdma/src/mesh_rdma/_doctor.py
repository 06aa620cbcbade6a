"""What `mesh doctor` says of transports."""

from __future__ import annotations

from collections.abc import Iterable

from mesh_core.plugins import Check, DoctorCheck, Finding, hookimpl


def _check() -> Iterable[Finding]:
    from mesh_rdma import _ucx
    from mesh_rdma._native_transports import REMEDIES, REMEDY
    from mesh_rdma._transports import transports

    for each in transports():
        if each.name == "ucx" and _ucx.places() is None:
            # Nothing is wrong with what nobody wants.
            yield Finding(status="ok", detail="ucx: switched off (MESH_RDMA_UCX)")
        elif each.reason is None:
            can = each.capabilities
            words = {
                "reads and writes": can.copies,
                "atomic operations": can.atomics,
                "other hosts": can.remote,
                "without the owner's processor": can.one_sided,
            }
            does = ", ".join(word for word, is_so in words.items() if is_so)
            yield Finding(status="ok", detail=f"{each.name}: {does}")
        else:
            remedy = REMEDIES.get(each.name, REMEDY)
            yield Finding(status="warn", detail=f"{each.name}: {each.reason}", remedy=remedy)


def _create() -> Check:
    return _check


RDMA = DoctorCheck(name="rdma", api_version=1, create=_create, summary="transports of RDMABuffer work here")


@hookimpl
def mesh_register_doctor_checks() -> Iterable[DoctorCheck]:
    """Offer the check."""
    yield RDMA
