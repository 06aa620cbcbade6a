"""Through the installed `mesh` command, as a user runs it."""

import json
import subprocess
import sysconfig
from pathlib import Path

MESH = Path(sysconfig.get_path("scripts"), "mesh")


def mesh(*arguments: str, status: int = 0) -> str:
    done = subprocess.run([MESH, *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_lines(machine: Path) -> None:
    assert mesh("sysinfo", "--root", str(machine)).splitlines() == [
        "cores   2",
        "memory  4.0 GiB",
        "node 0  CPUs 0, 2.0 GiB",
        "node 1  CPUs 1, 2.0 GiB",
        "gpu     0000:01:00.0  NVIDIA 10de:2335, driver nvidia, node 1",
        "gpu     0000:02:00.0  AMD 1002:2335, driver none",
    ]


def test_json(machine: Path) -> None:
    shown = json.loads(mesh("sysinfo", "--json", "--root", str(machine)))
    assert shown["cores"] == 2
    assert [each["cpus"] for each in shown["nodes"]] == ["0", "1"]
    assert [each["driver"] for each in shown["gpus"]] == ["nvidia", None]


def test_this_machine() -> None:
    assert mesh("sysinfo").startswith("cores ")


def test_a_tree_that_is_no_machine_is_a_failure(tmp_path: Path) -> None:
    mesh("sysinfo", "--root", str(tmp_path), status=1)


def test_listed_with_its_distribution() -> None:
    listed = json.loads(mesh("plugins", "--json"))["plugins"]
    ours = {(each["kind"], each["name"]) for each in listed if each["distribution"] == "mesh-sysinfo"}
    assert ours == {("command", "sysinfo"), ("doctor check", "gpus")}


def test_version_names_the_plugin_and_help_the_command() -> None:
    assert "mesh-sysinfo" in mesh("--version")
    assert "sysinfo" in mesh("--help")
    assert "--root" in mesh("sysinfo", "--help")
