"""How long hosts take: from `launch` to the first reply of all, and from `attach_job` to that.

    python benchmarks/launching.py --hosts 16

With mesh-launchers installed; the figures of ssh want Debian's openssh-server and root. Its hosts are servers on addresses of this machine, each with keys of its own.
Those of Kubernetes want what its tests want: a control plane (`python tools/control_plane`), etcd, the Python package kubernetes, and root.
Those of Slurm want Debian's slurmctld, slurmd and slurm-client, and root: three nodes, each with a network of its own, and the script on a fourth.
Those of Ray want Ray and root: its cluster is a head and three nodes on network namespaces of this machine, and beside it stands what Ray's own actors take there.
Each round is a script of its own, as a user's is; it imports before the clock starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
GREET = """
import os, sys, time
from mesh_core import Actor, endpoint, shutdown
from mesh_launchers import attach_job, launch

class Greeter(Actor):
    @endpoint
    def greet(self):
        return 1

def reply(job, count):
    greeters = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("greeters", Greeter)
    assert sum(greeters.greet.call().get(timeout=120).values()) == count

if __name__ == "__main__":
    begun = time.perf_counter()
"""
FIRST = """
    with launch(LAUNCHER, **OPTIONS) as job:
        reply(job, COUNT)
        took = time.perf_counter() - begun
    print("took", took, flush=True)
"""
KEEP = """
    job = launch("local", hosts=COUNT, name="benchmark", keep="60s").wait(60)
    kept = job.hosts.spawn_procs(per_host={"gpus": 1}, name="kept").spawn("kept", Greeter)
    assert sum(kept.greet.call().get(timeout=120).values()) == COUNT
"""
RAYS_OWN = """
import time
import ray
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

class Greeter:
    def greet(self):
        return 1

begun = time.perf_counter()
ray.init(log_to_driver=False, logging_level="ERROR")
group = placement_group([{"CPU": 1}] * COUNT, strategy="STRICT_SPREAD")
kind = ray.remote(Greeter)
places = [PlacementGroupSchedulingStrategy(group, at) for at in range(COUNT)]
greeters = [kind.options(num_cpus=1, scheduling_strategy=each).remote() for each in places]
assert sum(ray.get([each.greet.remote() for each in greeters])) == COUNT
print("took", time.perf_counter() - begun, flush=True)
"""
AGAIN = """
    job = attach_job("benchmark")
    job.hosts.initialized.get(timeout=60)
    took = time.perf_counter() - begun
    reply(job, COUNT)
    print("took", took, flush=True)
"""
KEPT = """
    job = attach_job("benchmark")
    assert sum(job.actors["kept"].greet.call().get(timeout=120).values()) == COUNT
    print("took", time.perf_counter() - begun, flush=True)
    # As a kernel that is killed.
    os.kill(os.getpid(), 9)
"""
ENDED = """
    attach_job("benchmark").stop()
"""


def seconds(
    text: str,
    launcher: str,
    options: dict[str, object],
    count: int,
    start: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
    *,
    killed: bool = False,
) -> float:
    """Run a script; how long it says that it took. It ends by itself, or kills itself."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    script = start([sys.executable, "-c", GREET + filled(text, launcher, options, count)], **pipes)
    out, error = script.communicate(timeout=300)
    if script.returncode != (-signal.SIGKILL if killed else 0):
        raise SystemExit(error)
    return float(out.split()[-1]) if out else 0.0


def slurm_seconds(rounds: int) -> list[float]:
    """Run a script on a Slurm cluster of three nodes; how long it says that it took, each time."""
    sys.path.insert(0, str(ROOT / "tests" / "network"))
    import slurm  # type: ignore[import-not-found, unused-ignore]
    from cluster import Network  # type: ignore[import-not-found, unused-ignore]

    if slurm.missing() is not None:
        return []
    took = []
    with tempfile.TemporaryDirectory() as folder, Network(4) as network:
        cluster = slurm.Slurm(network, Path(folder) / "slurm")
        options = {"hosts": 3, "exclusive": True, "python": sys.executable}
        for _ in range(rounds):
            text = GREET + filled(FIRST, "slurm", options, 3)
            out, error = cluster.script(text).communicate(timeout=300)
            if not out:
                raise SystemExit(error)
            took.append(float(out.split()[-1]))
            # The next one is to find the nodes free.
            while cluster.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split().count("idle") < 3:
                time.sleep(0.1)
    return took


def filled(text: str, launcher: str, options: dict[str, object], count: int) -> str:
    """Return a script with what it is to do."""
    for name, value in {"LAUNCHER": launcher, "OPTIONS": options, "COUNT": count}.items():
        text = text.replace(name, repr(value))
    return text


def with_ray(folder: Path, rounds: range) -> None:
    """Measure in a Ray cluster of three nodes."""
    sys.path.insert(0, str(ROOT / "tests" / "network"))
    from cluster import Network  # type: ignore[import-not-found, unused-ignore]
    from ray_nodes import Ray  # type: ignore[import-not-found, unused-ignore]

    count = 3
    with Network(count + 1) as network:
        nodes = Ray(network, folder / "ray")
        took: dict[str, list[float]] = {"ray": [], "its own": []}
        mesh = GREET + filled(FIRST, "ray", {"hosts": count}, count)
        for _ in rounds:
            for what, text in (("ray", mesh), ("its own", filled(RAYS_OWN, "", {}, count))):
                script = nodes.script(text)
                out, error = script.communicate(timeout=300)
                if script.returncode:
                    raise SystemExit(error)
                took[what].append(float(out.split()[-1]))
    shown(f"ray, {count} hosts", took["ray"])
    shown(f"Ray's own actors, {count} of them, from ray.init", took["its own"])


def shown(what: str, took: list[float]) -> None:
    """Print a row."""
    print(f"| {what} | {statistics.median(took):.3f} s | {min(took):.3f} to {max(took):.3f} |", flush=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    count, rounds = args.hosts, range(args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESH_JOBS"] = f"{folder}/jobs"
        os.environ["XDG_RUNTIME_DIR"] = folder
        print("| from launch to the first reply of all | median | least to most |\n| --- | --- | --- |")
        shown(f"local, {count} hosts", [seconds(FIRST, "local", {"hosts": count}, count) for _ in rounds])
        seconds(KEEP, "", {}, count)
        shown(
            f"attach_job, {count} hosts, until all are attached",
            [seconds(AGAIN, "", {}, count) for _ in rounds],
        )
        shown(
            f"attach_job after a kill, {count} hosts, first reply of the actors there",
            [seconds(KEPT, "", {}, count, killed=True) for _ in rounds],
        )
        seconds(ENDED, "", {}, count)
        if os.getuid() == 0 and Path("/usr/sbin/sshd").exists():
            sys.path.insert(0, str(ROOT / "packages" / "mesh-launchers" / "tests"))
            from sshd import Servers  # type: ignore[import-not-found, unused-ignore]

            servers = Servers(Path(folder) / "sshd", count)
            try:
                options = {"hosts": servers.names, "config": str(servers.config), "python": sys.executable}
                shown(f"ssh, {count} hosts", [seconds(FIRST, "ssh", options, count) for _ in rounds])
            finally:
                servers.close()
        if os.getuid() == 0 and importlib.util.find_spec("ray"):
            with_ray(Path(folder), rounds)
    if os.getuid() == 0:
        took = slurm_seconds(args.rounds)
        if took:
            shown("slurm, 3 hosts", took)
        with tempfile.TemporaryDirectory() as folder:
            kubernetes(Path(folder), args.rounds)


def kubernetes(folder: Path, rounds: int) -> None:
    """Measure pods, on a control plane and kubelets of the tests."""
    sys.path[:0] = [str(ROOT / "tests" / "network"), str(ROOT / "tools")]
    import cluster  # type: ignore[import-not-found, unused-ignore]
    import controlplane  # type: ignore[import-not-found, unused-ignore]

    if lacking := cluster.missing() or controlplane.missing():
        print(f"kubernetes was not measured: {lacking}", file=sys.stderr)
        return
    with cluster.Network(4) as network:
        plane = controlplane.ControlPlane(network, folder / "kubernetes")
        options = {
            "hosts": 3,
            "image": "mesh",
            "python": sys.executable,
            "one_per_node": True,
            "kubeconfig": str(plane.kubeconfig),
        }
        shown("local, 3 hosts", [seconds(FIRST, "local", {"hosts": 3}, 3) for _ in range(rounds)])
        took = [seconds(FIRST, "kubernetes", options, 3, plane.main.start) for _ in range(rounds)]
        shown("kubernetes, 3 pods", took)


if __name__ == "__main__":
    main()
