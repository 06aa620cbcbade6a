"""Create supervision policies by name."""

from __future__ import annotations

from mesh_core._common.errors import PluginError
from mesh_core._failures.policy_run import is_policy
from mesh_core.plugins import POLICIES, PluginManager
from mesh_core.policies import Policy


def create_policy(name: str) -> Policy:
    """Create the policy that an installed package offers under this name."""
    manager = PluginManager()
    plugin = manager.get(POLICIES, name)
    able = manager.probe(plugin)
    if not able:
        raise PluginError(
            f"policy {name!r} cannot work here: {able.reason}. Try: {able.remedy}.",
            kind=POLICIES.word,
            name=name,
            remedy=able.remedy,
        )
    policy = plugin.create()
    if not is_policy(policy):
        raise TypeError(
            f"create() of the policy {name!r} of {manager.origin(POLICIES, name)} must return a policy with "
            f"on(event, now), got {policy!r}"
        )
    return policy
