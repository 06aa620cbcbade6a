"""The global view on a device that is not the CPU: one of our own, whose copies are late, so that a missing wait or `device=` is found.

The tests of `on_gpu/` run on it, and a sample of PyTorch's database of operators. In processes of their own: a device is known to one for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")

import late_device
from levels import by_level, seed

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILES = ("test_global", "test_cuda", "test_offload", "test_limits")
LIMIT = 900
"""Seconds for a process, on a machine that has much other work."""

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of processes that have the device."""
    if reason := late_device.missing():
        pytest.skip(reason)
    # Kept from one run to the next, as it takes a minute.
    library = late_device.build(ROOT / ".nox" / "late-device")
    paths = [str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, late_device.VARIABLE: str(library), "PYTHONPATH": os.pathsep.join(paths)}


def started(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT
    )


def run(environment: dict[str, str], *command: str) -> str:
    done = started(environment, *command)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
    return done.stdout


LATE = """
import late_device
late_device.load()
import torch
x = torch.arange(6.0).to("late")
y = x.to("cpu", non_blocking=True)
assert not torch.equal(y, torch.arange(6.0))  # nobody has waited
torch.late.synchronize()
assert torch.equal(y, torch.arange(6.0))
source = torch.ones(3)
z = source.to("late", non_blocking=True)
source.zero_()  # the device has not read it yet
assert z.cpu().tolist() == [0.0, 0.0, 0.0]
assert torch.empty(4, device="late").isnan().logical_not().all()
try:
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[torch.ones(1, 1, 2, 2).to("late")] * 3)
except RuntimeError as error:
    assert "is for CPUs alone" in str(error)
else:
    raise AssertionError("an operator of the CPU has run")
print(torch.ops.late.late())
"""


def test_the_device_is_late_and_shows_it(environment: dict[str, str]) -> None:
    assert run(environment, "-c", LATE).split() == ["2"]


@pytest.fixture(scope="module")
def passed(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """The tests for a GPU, and whether they have passed. All of them in one process, as each would import PyTorch."""
    report = tmp_path_factory.mktemp("late") / "report.xml"
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", f"--timeout={LIMIT // 3}", f"--junitxml={report}")
    done = started(
        environment, "-m", "pytest", *options, *(str(HERE / "on_gpu" / f"{file}.py") for file in FILES)
    )
    # What has failed is shown by the test that looks for it.
    sys.stdout.write(done.stdout[-20_000:] + done.stderr[-4000:])
    assert done.returncode in {0, 1}, done.returncode
    return {
        f"{case.get('classname')}.{case.get('name')}": not [*case.iter("failure"), *case.iter("error")]
        for case in ElementTree.parse(report).getroot().iter("testcase")
    }


@pytest.mark.parametrize("file", FILES)
def test_what_is_for_a_gpu_passes_on_it(passed: dict[str, bool], file: str) -> None:
    of_file = {name: well for name, well in passed.items() if f".{file}." in name}
    assert of_file
    assert all(of_file.values()), [name for name, well in of_file.items() if not well]


def test_a_sample_of_all_operators(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's database of operators needs expecttest")
    results = tmp_path / "operators.jsonl"
    which = ("--one-in", str(by_level(quick=60, full=60, everything=1)), "--seed", str(len(seed())))
    run(
        environment,
        "tools/operator_database.py",
        "2",
        "--global",
        "--device",
        "late",
        "--results",
        str(results),
        *which,
    )
    about, *told = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert about["about"]["operators"] == len(told)
    wrong = {
        each["operator"]: each["said"]["2"]
        for each in told
        if (each["said"]["2"] or "").startswith("SomethingElse")
    }
    refused = [each["operator"] for each in told if each["said"]["2"] is not None]
    assert not wrong
    assert len(told) >= 5
    assert len(refused) <= 0.1 * len(told), refused
