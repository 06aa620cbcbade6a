"""Each example under `examples/` runs, ends by itself, and prints what it is there to show."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import workspace
from mesh_core.testing import LocalCluster
from warm_scripts import TORCH, WarmProcess, WarmScripts

EXAMPLES = workspace.ROOT / "examples"
LONGEST = 100
TESTED = {
    "batch_inference",
    "captured_training",
    "crawler",
    "ddp",
    "generators_trainer",
    "global_transformer",
    "grpo",
    "healed_training",
    "parameter_server",
    "philosophers",
    "ping_pong",
    "several_hosts",
    "supervision",
    "tool_agent",
    "sweep",
    "tensor_grpo",
    "tensor_pipeline",
    "tensor_streams",
    "tour",
    "weight_sync",
}
ELSEWHERE = {"demo"}

pytestmark = pytest.mark.slow


# The line of each example that names its hosts, and what stands there for a cluster. Nothing else changes.
NAMES_HOSTS = {
    "ping_pong": (
        "    here, there = this_host(), this_host()",
        "    here, _, there = (host for _, host in {hosts})",
    ),
    "supervision": (
        '        foreman = office.spawn("foreman", Foreman, this_host())',
        '        foreman = office.spawn("foreman", Foreman, {hosts})',
    ),
    "tour": (
        '    with this_host().spawn_procs({"hosts": 2, "gpus": 2}) as procs:',
        '    with {hosts}.slice(hosts=slice(0, 2)).spawn_procs({"gpus": 2}) as procs:',
    ),
}
ANY_HOSTS = ("    hosts = this_host()", "    hosts = {hosts}")

Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=3) as cluster:
        yield cluster


# Quick runs draw a few of those that only change where they run, and of those that take PyTorch its seconds.
ELSEWHERE_TOO = pytest.param("three hosts", marks=pytest.mark.sampled(3, of="file", full=True))
long = pytest.mark.sampled(10, of="file", full=True)


@pytest.fixture(scope="module")
def with_torch() -> Iterator[WarmScripts]:
    """What examples are forked from that would each import PyTorch, and so would their fork servers."""
    scripts = WarmScripts(environment(), TORCH)
    yield scripts
    scripts.close()


@pytest.fixture(params=["one host", ELSEWHERE_TOO])
def run_example(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs an example as it is; or with the one line changed that names its hosts."""

    def scripts(path: Path) -> WarmScripts | None:
        return request.getfixturevalue("with_torch") if "import torch" in path.read_text() else None

    if request.param == "one host":

        def run_here(name: str, *arguments: str, within: float = 50) -> list[str]:
            path = EXAMPLES / f"{name}.py"
            return run_script(path, *arguments, within=within, warm=scripts(path))

        return run_here
    cluster = request.getfixturevalue("cluster")
    hosts = (
        f"__import__('mesh_core').attach_to_workers({cluster.addresses}, credentials={cluster.credentials!r})"
    )

    def run(name: str, *arguments: str, within: float = 50) -> list[str]:
        line, other = NAMES_HOSTS.get(name, ANY_HOSTS)
        lines = (EXAMPLES / f"{name}.py").read_text().split("\n")
        assert lines.count(line) == 1
        lines[lines.index(line)] = other.replace("{hosts}", hosts)
        path = tmp_path / f"{name}.py"
        path.write_text("\n".join(lines))
        return run_script(path, *arguments, within=within, warm=scripts(path))

    return run


# What mesh-rdma logs as it first reaches an owner.
CHOSEN = re.compile(r"^(\[.*\] )?INFO mesh_rdma: memory of .* is reached by .*\n", re.MULTILINE)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "error"}


def run_script(path: Path, *arguments: str, within: float, warm: WarmScripts | None = None) -> list[str]:
    env, words = environment(), [str(path), *arguments]
    if warm is not None and warm.suits(env):
        process: subprocess.Popen[str] = WarmProcess(warm, words, env, stdin=subprocess.DEVNULL)
    else:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, *words], **streams, text=True, env=env)
    with process:
        try:
            out, err = process.communicate(timeout=within)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, out + err
    assert CHOSEN.sub("", err) == ""
    return out.splitlines()


# `print` writes one value after the other, and what a worker has printed may come in between.
TORN = re.compile(r"^(\w+ +)(\[(?:mine|counters)\b.*)\n(.*)$", re.MULTILINE)


def shown(lines: list[str]) -> dict[str, str]:
    """Lines of the tour by their first word."""
    whole = TORN.sub(r"\1\3\n\2", "\n".join(lines)).split("\n")
    return {word: rest.strip() for word, _, rest in (line.partition(" ") for line in whole)}


def test_a_line_that_came_in_between_is_put_behind():
    assert shown(["call      [11, 11]", "owner     [mine on host-0] leaves with 0", "rank 0 died"]) == {
        "call": "[11, 11]",
        "owner": "rank 0 died",
        "[mine": "on host-0] leaves with 0",
    }


def test_every_example_is_tested_and_short():
    found = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert set(found) == TESTED | ELSEWHERE
    too_long = {name: n for name in TESTED if (n := found[name].read_text().count("\n")) >= LONGEST}
    assert not too_long


def test_tour(run_example: Run):
    said = shown(run_example("tour"))
    assert said["mesh"] == "<ActorMesh 'counters' of Counter: hosts=2, gpus=2>"
    assert said["call"] == "[11, 11, 11, 11]"
    assert said["call_one"] == "16"
    assert said["choose"] == "True"
    assert said["broadcast"] == "[116, 111, 111, 111]"
    assert said["stream"] == "[111, 111, 111, 116]"
    assert said["slice"] == "['Point(gpus=0 of 2)', 'Point(gpus=1 of 2)']"
    assert said["results"] == "[(0, 116), (1, 111), (2, 111), (3, 111)] 111"
    assert said["flatten"] == "111"
    assert said["pipelined"] == "[[112, 112], [113, 113], [114, 114]]"
    assert said["asyncio"] == "['slept', 'slept']"
    assert said["cancel"] == "True"
    assert said["error"] == "ActorError[ValueError] says: cannot count down by 1"
    assert "deadline of 0.05 s" in said["deadline"]
    # On a busy machine a death may be told before its status is known.
    assert re.match(r"rank 3 \(hosts=1, gpus=1\) of mesh 'counters' died on host ", said["failure"])
    assert said["outcomes"] == "[116, 111, 114, 'dead']"
    assert said["ports"] == "[111, 114, 114, 116]"
    assert said["reduce"] == "455"
    assert said["owner"].startswith("rank 0 of mesh 'mine' died on host ")
    # What is printed on another host says on which.
    printed = {word: re.sub(r" on host-\d\]", "]", rest) for word, rest in said.items()}
    assert printed["[counters"] == "hosts=1,gpus=1] leaves with 114"
    mine = printed.get("[mine]") or printed["[mine"].removeprefix("on host-0] ")
    assert mine == "leaves with 0"


def test_ping_pong(run_example: Run):
    lines = run_example("ping_pong")
    game = " ".join(["ping pong"] * 5)
    assert lines == ["pair 0: 10 hits", "pair 1: 10 hits", f"pair 0: {game}", f"pair 1: {game}"]


def test_parameter_server(run_example: Run):
    pytest.importorskip("mesh_rdma", reason="mesh-rdma is not installed here")
    pytest.importorskip("numpy", reason="numpy is not installed here")
    *workers, distance = run_example("parameter_server")
    assert [line.split(",")[0] for line in workers] == [f"{n} of 3 workers done" for n in (1, 2, 3)]
    # Of workers on several hosts that end together, the one with the last step need not be the last to answer.
    assert max(int(line.rpartition(" weights at version ")[2]) for line in workers) == 600
    numbers = re.fullmatch(r"distance to the truth: (\S+) before, (\S+) after", distance)
    assert numbers is not None
    assert float(numbers[2]) < float(numbers[1]) / 100


def test_batch_inference(run_example: Run):
    scored, aside, slowest = run_example("batch_inference")
    assert scored == "232 of 240 rows scored"
    assert aside == "set aside by readers.parse, of shard 2: Expecting value: line 1 column 7 (char 6)"
    assert re.fullmatch(r"slowest: (models\.infer|readers\.\w+|writers\.write|the .+)", slowest)


def test_crawler(run_example: Run):
    *crawlers, together = run_example("crawler")
    counts = [re.fullmatch(r"crawler (\d): (\d+) pages", line) for line in crawlers]
    assert [count and count[1] for count in counts] == ["0", "1", "2", "3"]
    assert sum(int(count[2]) for count in counts if count) == 200
    assert together == "together: 200 requests for 200 pages"


def test_tool_agent(run_example: Run):
    lines = run_example("tool_agent")
    assert len(lines) == 5
    assert lines[0] == "the sum of the squares below 10: 285, after 1 attempt"
    assert re.fullmatch(r"the longest word: wonderful, after 2 attempts: ValueError: .*", lines[1])
    assert re.fullmatch(r"the answer to everything: 42, after 2 attempts: it took more than 2 s", lines[2])
    assert re.fullmatch(
        r"how many primes there are below 1000: 168, after 2 attempts: .*[Mm]emory.*", lines[3]
    )
    assert re.fullmatch(r"six by seven: 42, after 2 attempts: it crashed with status -6", lines[4])


def test_philosophers(run_example: Run):
    *reports, forks = run_example("philosophers")
    names = ["Arendt", "Buber", "Confucius", "Diotima", "Epicurus"]
    assert [line.split(" and ")[0] for line in reports] == [f"{name} has eaten 20 times" for name in names]
    assert forks == "forks were used [40, 40, 40, 40, 40] times"


def test_generators_trainer(run_example: Run):
    *generators, machines = run_example("generators_trainer")
    sent = [re.fullmatch(r"generator \d sent (\d+) batches", line) for line in generators]
    assert sum(int(count[1]) for count in sent if count) == 150
    chosen = [int(number) for number in re.findall(r"(\d+)%", machines)]
    assert len(chosen) == 4
    assert chosen[2] > 90


def test_weight_sync(run_example: Run):
    pytest.importorskip("mesh_rdma", reason="mesh-rdma is not installed here")
    pytest.importorskip("numpy", reason="numpy is not installed here")
    *steps, batches = run_example("weight_sync")
    left = [float(line.split()[2]) for line in steps]
    assert left == sorted(left, reverse=True) and left[-1] < 0.45
    behind = {int(n): int(count) for n, count in re.findall(r"(\d+) versions behind: (\d+)", batches)}
    assert set(behind) <= {0, 1} and sum(behind.values()) in (240, 720)


def test_sweep(run_example: Run):
    *rounds, best, counts = run_example("sweep")
    halves = [re.match(r"(\d+) of (\d+) go on to step (\d+); ", line) for line in rounds]
    assert [each and each.groups() for each in halves] == [
        ("8", "16", "8"),
        ("4", "8", "16"),
        ("2", "4", "32"),
        ("1", "2", "64"),
    ]
    assert re.fullmatch(r"trial \d+ is the best: rate 0.\d\d, momentum 0.\d\d, loss \S+", best)
    assert counts == "1 was trained to the end, 15 were stopped early"


def test_grpo(run_example: Run):
    rewards = [float(line.rpartition(" ")[2]) for line in run_example("grpo")]
    assert len(rewards) == 5
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.95


def test_several_hosts():
    hosts, primes, *found, dead, others = run_script(EXAMPLES / "several_hosts.py", within=50)
    assert hosts == "3 hosts: host-0, host-1, host-2"
    assert primes == "3245 primes below 30000"
    counts = [re.fullmatch(r"host-\d has found (\d+)", line) for line in found]
    assert sum(int(count[1]) for count in counts if count) == 3245
    assert (dead, others) == ("host-2 is dead: True", "the others go on: True")


def test_supervision(run_example: Run):
    lost, added_up = run_example("supervision", "--seconds", "3")
    workers = re.fullmatch(r"lost (\d+) workers: (.*)", lost)
    assert workers is not None
    ways = dict(reversed(way.split(" by ")) for way in workers[2].split(", "))
    assert set(ways) <= {"exception", "exit", "signal"}
    assert sum(map(int, ways.values())) == int(workers[1]) > 0
    assert re.fullmatch(r"added up \d+ blocks, and the sum is right", added_up)


@long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the ranks train with PyTorch")
@pytest.mark.timeout(180)  # importing PyTorch takes a busy machine its time
def test_ddp(run_example: Run):
    *steps, agree = run_example("ddp", within=150)
    for line in steps:
        losses = re.fullmatch(r"step .\d: loss (\S+) on one process, (\S+) on 2", line)
        assert losses is not None
        assert float(losses[1]) == pytest.approx(float(losses[2]), abs=2e-4)
    assert len(steps) == 4
    assert agree == "the losses agree: True"


@long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the ranks train with PyTorch")
@pytest.mark.timeout(180)  # importing PyTorch takes a busy machine its time
def test_healed_training(run_example: Run):
    lines = run_example("healed_training", within=150)
    assert lines[:3] == [
        f"after step {step} rank {rank} was lost" for step, rank in ((5, 2), (11, 0), (23, 3))
    ]
    assert len(lines) == 7
    assert lines[-1] == "the losses are the same: True"


@long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the mesh computes with PyTorch")
@pytest.mark.timeout(180)  # importing PyTorch takes a busy machine its time
@pytest.mark.parametrize("run_example", ["one host"], indirect=True)  # collectives stay on one host so far
def test_global_transformer(run_example: Run):
    lines = run_example("global_transformer", within=150)
    losses = [
        re.fullmatch(r"step \d: (\S+) on the mesh, (\S+) in one process", line).groups() for line in lines
    ]
    assert len(losses) == 10
    assert all(float(mesh) == pytest.approx(float(alone), abs=2e-4) for mesh, alone in losses)
    assert float(losses[-1][0]) < float(losses[0][0])


@long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the mesh computes with PyTorch")
@pytest.mark.timeout(180)  # importing PyTorch takes a busy machine its time
@pytest.mark.parametrize("run_example", ["one host"], indirect=True)  # collectives stay on one host so far
def test_captured_training(run_example: Run):
    plain, captured, *rest = run_example("captured_training", within=150)
    assert plain.split(",")[0].split()[2:] == captured.split(",")[0].split()[1:]
    assert rest == [
        "58 of 60 calls were replays; the others:",
        "  the first call",
        "  AdamW has made its state",
        "losses are the same",
    ]


@long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the mesh computes with PyTorch")
@pytest.mark.timeout(180)  # importing PyTorch takes a busy machine its time
@pytest.mark.parametrize("run_example", ["one host"], indirect=True)  # collectives stay on one host so far
def test_tensor_streams(run_example: Run):
    output = run_example("tensor_streams", within=150)
    assert output[0] == "the same weights"
    assert len(output) == 3


@long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the mesh computes with PyTorch")
@pytest.mark.timeout(180)  # importing PyTorch takes a busy machine its time
@pytest.mark.parametrize("run_example", ["one host"], indirect=True)  # collectives stay on one host so far
def test_tensor_pipeline(run_example: Run):
    losses = [re.findall(r"\d\.\d+", line) for line in run_example("tensor_pipeline", within=150)]
    assert len(losses) == 3
    for alone, pipelined in losses:
        assert abs(float(alone) - float(pipelined)) < 2e-4
    assert float(losses[-1][0]) < float(losses[0][0])


@long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the mesh computes with PyTorch")
@pytest.mark.timeout(180)  # importing PyTorch takes a busy machine its time
@pytest.mark.parametrize("run_example", ["one host"], indirect=True)  # collectives stay on one host so far
def test_tensor_grpo(run_example: Run):
    pytest.importorskip("mesh_rdma")
    rewards = [
        float(line.rsplit(" ", 1)[1])
        for line in run_example("tensor_grpo", within=150)
        if line[:5] == "round"
    ]
    assert len(rewards) == 4
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.8


@long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the mesh computes with PyTorch")
@pytest.mark.timeout(180)  # importing PyTorch takes a busy machine its time
@pytest.mark.parametrize("run_example", ["one host"], indirect=True)  # collectives stay on one host so far
def test_tensor_grpo_without_mesh_rdma(run_example: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    package = tmp_path / "without" / "mesh_rdma"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not installed here')")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    rewards = [
        float(line.rsplit(" ", 1)[1])
        for line in run_example("tensor_grpo", within=150)
        if line[:5] == "round"
    ]
    assert rewards[-1] > 0.8


# What runs the notebook's cells, and prints their output. Not in the test's own process: it leaves threads behind.
EXECUTE = """
import sys
import nbclient, nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=40, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(output.get("text") or output["data"]["text/plain"])
"""


@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
    reason="nbclient and ipykernel are not installed",
)
def test_notebook_stepping(tmp_path):
    path = EXAMPLES / "notebook_stepping.ipynb"
    cells = json.loads(path.read_text())["cells"]
    assert cells[0]["source"][0].startswith("# "), "it begins with what it shows"
    assert not any(cell.get("outputs") for cell in cells), "kept without output"
    assert sum(len(cell["source"]) for cell in cells) < LONGEST
    own = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=55,
        env={**os.environ, **own},
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    rows = re.findall(r"rank (\d)  loss +(\S+)  gradient norm +(\S+)", said)
    assert [int(rank) for rank, _, _ in rows] == [0, 1, 2, 3] * 3
    losses = [[float(loss) for _, loss, _ in rows[n : n + 4]] for n in (0, 4, 8)]
    assert max(losses[1]) < min(losses[0]) / 5 and max(losses[2]) < min(losses[1]) / 5
    assert "'steps': 22" in said
    assert "{0: 2.98, 1: 2.98, 2: 2.98, 3: 2.98}" in said


def test_examples_say_what_they_are():
    for path in EXAMPLES.glob("*.py"):
        assert path.read_text().startswith('"""'), f"{path.name} begins with what it shows"
