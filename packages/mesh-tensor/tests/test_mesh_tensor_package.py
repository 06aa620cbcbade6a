"""The package's names, with PyTorch and without. What all packages have in common is in the workspace's `tests/test_packages.py`."""

import importlib.util

import pytest

import mesh_tensor


def test_all_names_are_there_or_say_what_they_need():
    assert sorted(mesh_tensor.__all__) == dir(mesh_tensor)
    if importlib.util.find_spec("torch") is None:
        with pytest.raises(ImportError, match="pip install torch"):
            _ = mesh_tensor.activate
    else:
        assert all(getattr(mesh_tensor, name) is not None for name in mesh_tensor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tensors'"):
        _ = mesh_tensor.tensors
