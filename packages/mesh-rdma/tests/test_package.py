"""The package as it is: its names and errors. What all packages have in common is in the workspace's `tests/test_packages.py`."""

import mesh_rdma
from mesh_rdma import RDMAError, _errors, _native


def test_every_name_is_listed():
    assert dir(mesh_rdma) == sorted(mesh_rdma.__all__)


def test_every_kind_of_error_has_an_exception():
    assert set(_errors.KINDS) == set(_native.ERROR_KINDS)
    assert all(issubclass(kind, RDMAError) for kind in _errors.KINDS.values())
