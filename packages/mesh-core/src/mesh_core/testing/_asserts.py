"""Failed asserts of conformance suites show their values, as those of an author's own tests do."""

from __future__ import annotations

import sys
from typing import Any


def rewrite_asserts(*modules: str) -> None:
    """Let pytest show the values in failed asserts of these modules, if pytest is running. They must not be imported yet.

    The owner of a kind calls it in the package that offers the kind's suite, before it imports the suite:

    >>> from mesh_core.testing import rewrite_asserts
    >>> rewrite_asserts("mesh_stores.testing._suite")
    """
    if "_pytest.assertion.rewrite" in sys.modules:
        import pytest

        pytest.register_assert_rewrite(*modules)


def expect_bytes(found: Any, expected: Any, said: str) -> None:
    """Fail unless these are the same bytes, and say where they first differ.

    An assert that pytest rewrites would compare them line by line for its message, which takes minutes for a megabyte.

    >>> from mesh_core.testing import expect_bytes
    >>> expect_bytes(bytearray(b"data"), b"dada", "what was read is not what was offered")
    Traceback (most recent call last):
    AssertionError: what was read is not what was offered: at 2 of 4 bytes 0x74 instead of 0x64; 1 byte differs
    """
    if found == expected:
        return
    found, expected = bytes(found), bytes(expected)
    if len(found) != len(expected):
        raise AssertionError(f"{said}: {len(found)} bytes instead of {len(expected)}")
    wrong = [at for at, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
    first, count = wrong[0], len(wrong)
    raise AssertionError(
        f"{said}: at {first} of {len(expected)} bytes 0x{found[first]:02x} instead of 0x{expected[first]:02x}; "
        f"{count} {'byte differs' if count == 1 else 'bytes differ'}"
    )


rewrite_asserts("mesh_core.testing._bypasses", "mesh_core.testing._plugins")
