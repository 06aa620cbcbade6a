"""All that the package offers is documented. What all packages have in common is in the workspace's `tests/test_packages.py`."""

from __future__ import annotations

from pathlib import Path

import mesh_supervision
import mesh_supervision.testing
from mesh_core.plugins import POLICIES, PluginManager

PACKAGE = Path(__file__).parents[1]
DOCS = PACKAGE.parents[1] / "docs"
PAGES = (
    "choose-a-policy",
    "restore-state",
    "heal-a-training",
    "elastic-training",
    "watch-a-job",
    "watch-health",
)


def test_every_public_name_is_documented() -> None:
    text = "".join((DOCS / "how-to" / f"{page}.md").read_text() for page in PAGES)
    for module in (mesh_supervision, mesh_supervision.testing):
        for name in module.__all__:
            if not name.startswith("_"):
                assert f"`{name}" in text or f"{name}(" in text, f"no page mentions {name}"
                assert (getattr(module, name).__doc__ or "").strip()


def test_every_policy_that_has_a_name_is_documented() -> None:
    text = (DOCS / "how-to" / "choose-a-policy.md").read_text()
    entries = [each for each in PluginManager().entries(POLICIES) if each.distribution == "mesh-supervision"]
    assert len(entries) == 5
    for each in entries:
        assert f'`"{each.name}"`' in text, f"the page does not mention {each.name}"
