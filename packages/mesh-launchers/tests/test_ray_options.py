"""What the launcher ray and torchrun's hosts check before anything is started; they run on real clusters in tests/network."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from mesh_core.plugins import PluginManager
from mesh_launchers import LAUNCHERS, LauncherPlugin, LaunchError, launch, torchrun


@pytest.fixture
def ray() -> LauncherPlugin:
    plugin = PluginManager().get(LAUNCHERS, "ray")
    assert isinstance(plugin, LauncherPlugin)
    return plugin


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"strategy": "SCATTER"}, "strategy must be 'STRICT_SPREAD', .* got 'SCATTER'"),
        ({"cpus": -1}, "CPU must not be negative, got -1"),
        ({"cpus": 0}, "a host must ask for something"),
        ({"queue_timeout": 0}, "queue_timeout must be a number of seconds, .* got 0"),
        ({"queue_timeout": "soon"}, "queue_timeout must be a number of seconds, .* got 'soon'"),
        ({"address": "ray://head:10001"}, "launch from a node of the cluster"),
        ({"python": ["python3"], "cpu": 1}, "no option 'cpu'; did you mean 'cpus'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        launch("ray", hosts=1, **options)


def test_resources_of_hosts_are_reported_in_rays_words(ray: LauncherPlugin) -> None:
    asked = ray.options(cpus=2, gpus=0.5, memory=1 << 30, resources={"highmem": 1}).bundle()
    assert asked == {"CPU": 2, "GPU": 0.5, "memory": 1 << 30, "highmem": 1}
    assert ray.options().bundle() == {"CPU": 1}


def test_missing_ray_says_how_to_get_it(ray: LauncherPlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    probe = ray.probe()
    assert not probe.available
    assert "Ray is not installed here" in str(probe.reason)
    assert "pip install 'mesh-launchers[ray]'" in str(probe.remedy)


def test_a_script_outside_of_torchrun_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    with pytest.raises(LaunchError, match="GROUP_RANK is not set: torchrun --nnodes=2"), torchrun.hosts():
        pass


def test_further_ranks_of_a_node_end_with_status_0(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"GROUP_RANK": 1, "GROUP_WORLD_SIZE": 2, "LOCAL_RANK": 3, "RANK": 7, "TORCHELASTIC_RUN_ID": "lab"}
    for name, value in {**said, "MASTER_ADDR": "b1", "MASTER_PORT": 29400}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended, torchrun.hosts():
        pass
    assert ended.value.code == 0
