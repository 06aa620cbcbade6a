"""The reference pages that are made from docstrings are up to date."""

from __future__ import annotations

import importlib.util

import pytest

import reference_pages
from workspace import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_a_page_says_what_the_docstrings_say(name: str) -> None:
    package, _ = reference_pages.PAGES[name]
    for needed in (package, *(["torch"] if package == "mesh_tensor" else [])):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed here")
    page = ROOT / "docs" / "reference" / f"{name}.md"
    assert page.read_text() == reference_pages.page(name), "run `python tools/reference_pages.py`"
