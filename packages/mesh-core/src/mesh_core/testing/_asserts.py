"""Failed asserts of conformance suites show their values, as those of an author's own tests do."""

from __future__ import annotations

import sys


def rewrite_asserts(*modules: str) -> None:
    """Let pytest show the values in failed asserts of these modules, if pytest is running. They must not be imported yet.

    The owner of a kind calls it in the package that offers the kind's suite, before it imports the suite:

    >>> from mesh_core.testing import rewrite_asserts
    >>> rewrite_asserts("mesh_stores.testing._suite")
    """
    if "_pytest.assertion.rewrite" in sys.modules:
        import pytest

        pytest.register_assert_rewrite(*modules)


rewrite_asserts("mesh_core.testing._bypasses", "mesh_core.testing._plugins")
