"""The launcher kubernetes on a real control plane, with three nodes whose kubelets are the tests' own."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import controlplane
import pytest
from cluster import Host, Network, Process, files_of_jobs, wait_until
from conftest import children
from controlplane import ControlPlane
from launching import OUTLIVES, ended, heard

pytest.importorskip("mesh_launchers", reason="mesh-launchers is not installed here")

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(controlplane.missing() is not None, reason=str(controlplane.missing())),
]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "launch-by-kubernetes.md"
LIMIT = 90.0
BEGIN = """
import sys, time
from mesh_core import Actor, configure, endpoint, set_fault_handler
from mesh_launchers import *

class Where(Actor):
    @endpoint
    def where(self):
        import os, socket
        # The variables of a pod are those of its agent, and of what that starts.
        assert os.environ["HOSTNAME"] == socket.gethostname()
        return socket.gethostname()

def where(hosts):
    return sorted(hosts.spawn_procs(per_host={"gpus": 1}).spawn("where", Where).where.call().get(timeout=60).values())

def say(*what):
    print(*what, sep=" | ", flush=True)

def failed(job):
    found = []
    while not found:
        time.sleep(0.01)
        found = [(each.name, " ".join(each.why.split())) for each in job.state().hosts if each.phase is Phase.FAILED]
    return found

class Environ(Actor):
    @endpoint
    def environ(self, name):
        import os
        return os.environ.get(name)

def environ(hosts, name):
    return hosts.spawn_procs().spawn("environ", Environ).environ.call(name).get(timeout=60).values()

def refused(hosts=1, **options):
    with launch("kubernetes", hosts=hosts, **{**OPTIONS, **options}) as job:
        say(failed(job)[0][1])

def state(job, words):
    while words not in str(job.state()):
        time.sleep(0.01)
    say(job.state())

if __name__ == "__main__":
    configure(heartbeat_timeout=30)
    set_fault_handler(lambda failure: True)
"""


class Site:
    """A namespace of the cluster, and the scripts that launch there."""

    def __init__(self, cluster: ControlPlane, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.namespace = f"test-{uuid.uuid4().hex[:8]}"
        self.path = f"/api/v1/namespaces/{self.namespace}"
        self.jobs = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        self.scripts: list[Process] = []
        self.options: dict[str, Any] = {
            "image": "mesh",
            "python": sys.executable,
            "namespace": self.namespace,
            "kubeconfig": str(cluster.kubeconfig),
        }
        cluster.ask("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        wait_until(lambda: cluster.has(f"{self.path}/serviceaccounts/default"), "no service account", LIMIT)

    def run(self, text: str, **options: Any) -> Process:
        """Start a script that launches."""
        body = "".join(f"    {line}\n" for line in text.splitlines())
        given = f"OPTIONS = { ({**self.options, **options})!r}\n"
        return self.cluster.script(given + BEGIN + body, self.folder)

    def pods(self) -> dict[str, dict[str, Any]]:
        """The pods, by the names of their Jobs and their numbers."""
        found = self.cluster.ask("GET", f"{self.path}/pods")["items"]
        return {each["metadata"]["name"].rsplit("-", 1)[0]: each for each in found}

    def create(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make something in the namespace."""
        return self.cluster.ask("POST", f"{self.path}/{kind}", body)

    def left(self) -> list[str]:
        """What there is of jobs."""
        found = []
        for path in (self.jobs, *(f"{self.path}/{kind}" for kind in ("pods", "secrets", "services"))):
            found += [each["metadata"]["name"] for each in self.cluster.ask("GET", path)["items"]]
        return found

    def nothing_is_left(self) -> None:
        """No object, process or file."""
        wait_until(lambda: not self.left(), lambda: f"{self.namespace} has {self.left()}", LIMIT)
        for host in self.cluster.nodes:
            assert hosts_on(host) == []
        # The process that keeps a job removes its files last.
        jobs = self.folder / "jobs"
        wait_until(lambda: not files_of_jobs(jobs), lambda: f"there are {files_of_jobs(jobs)}", LIMIT)


def hosts_on(machine: Host) -> list[int]:
    """The first processes of hosts' containers on a machine."""
    with machine.network():
        network = Path("/proc/thread-self/ns/net").stat().st_ino
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                status = (process / "status").read_text()
                words = (process / "cmdline").read_bytes().split(b"\0")
                is_here = (process / "ns/net").stat().st_ino == network
            except OSError:
                continue  # it has ended since
            if is_here and b"mesh-host" in words and re.search(r"^NSpid:.*\t1$", status, re.MULTILINE):
                found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One for all tests, each of which has a namespace of its own."""
    with Network(4) as network:
        yield ControlPlane(network, tmp_path_factory.mktemp("kubernetes"))


@pytest.fixture(autouse=True)
def tidy(cluster: ControlPlane) -> Iterator[None]:
    """Nothing stays behind a test but the cluster, whose daemons some tests start anew."""
    before = children(), {thread.name for thread in threading.enumerate()}

    def left() -> set[str]:
        return children() - before[0] - {str(each.pid) for each in cluster.processes}

    yield
    wait_until(lambda: not left(), "processes are left", 10)
    assert {thread.name for thread in threading.enumerate()} <= before[1]


@pytest.fixture
def site(cluster: ControlPlane, tmp_path: Path) -> Iterator[Site]:
    """A namespace, in which nothing is left at the end."""
    site = Site(cluster, tmp_path)
    yield site
    for each in site.scripts:
        each.close()
    site.nothing_is_left()
    cluster.ask("DELETE", f"/api/v1/namespaces/{site.namespace}")


def test_hosts_of_kubernetes(site: Site) -> None:
    """K8S-1: launch, call, logs, a host that dies, more hosts, fewer, and the end."""
    script = site.run(
        """
with launch("kubernetes", hosts=3, name="lab", one_per_node=True, **OPTIONS) as job:
    say(*where(job.hosts))
    say(*job.hosts.names, *sorted(job.hosts.labels[0].items()))
    say("listens at" in job.logs()["lab-0"], "environment" in job.logs()["lab-0"])
    say(*failed(job)[0])
    say(*where(job.scale(3)))
    say(*where(job.scale(1)))
    input()
    job.stop()
    job.stop()
"""
    )
    assert heard(script) == "mesh-lab-0-0 | mesh-lab-0-1 | mesh-lab-0-2"
    assert heard(script) == "lab-0 | lab-1 | lab-2 | ('mesh', 'hosts')"
    assert heard(script) == "True | False"
    nodes = {each["spec"]["nodeName"]: name for name, each in site.pods().items()}
    assert sorted(nodes) == ["host1", "host2", "host3"]
    owner = site.cluster.ask("GET", f"{site.jobs}/mesh-lab-0")["metadata"]["uid"]
    for kind in ("secrets", "services"):
        found = site.cluster.ask("GET", f"{site.path}/{kind}/mesh-lab-0")
        assert [each["uid"] for each in found["metadata"]["ownerReferences"]] == [owner]
    manifest = json.loads((site.folder / "jobs/lab/launcher/mesh-lab-0.json").read_text())
    assert manifest["spec"]["template"]["spec"]["subdomain"] == "mesh-lab-0"
    # All have read them.
    wait_until(
        lambda: list(site.cluster.ask("GET", f"{site.path}/secrets/mesh-lab-0")["data"]) == ["beat"],
        "the credentials are still there",
    )
    [host] = hosts_on(site.cluster.nodes[0])
    os.kill(host, signal.SIGKILL)
    number = nodes["host1"].rpartition("-")[2]
    said = heard(script)
    assert said.startswith(f"lab-{number} | its container has ended with status 137")
    assert "listens at" in said
    rest = [f"mesh-lab-0-{each}" for each in "012" if each != number]
    assert heard(script) == " | ".join([*rest, "mesh-lab-1-0"])
    assert heard(script) == rest[0]
    assert rest[1] not in site.pods()
    ended(script)


def test_a_job_outlives_its_first_certificates(site: Site) -> None:
    """CRT-1, K8S-1."""
    script = site.run(
        OUTLIVES
        + """
with launch("kubernetes", hosts=2, name="old", **OPTIONS) as job:
    job_outlives(job)
"""
    )
    assert heard(script) == "outlived | [1, 1, 1]"
    ended(script)


def test_passes_the_suite(site: Site) -> None:
    suite = f"""
import subprocess
import kubernetes
import pytest
from mesh_core.plugins import PluginManager
from mesh_launchers import LAUNCHERS
from mesh_launchers.testing import LauncherConformance

class TestKubernetes(LauncherConformance):
    plugin = PluginManager().get(LAUNCHERS, "kubernetes")
    distribution = "mesh-launchers"
    options = {site.options!r}

    def kill(self, host):
        kubernetes.config.load_kube_config(self.options["kubeconfig"])
        core = kubernetes.client.CoreV1Api()
        selector = f"batch.kubernetes.io/job-completion-index={{host.number}}"
        [pod] = core.list_namespaced_pod(self.options["namespace"], label_selector=selector).items
        core.delete_namespaced_pod(pod.metadata.name, self.options["namespace"])
        return True
"""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
    tests = site.cluster.script(suite, site.folder, *words, name="test_suite.py")
    out, _ = tests.communicate(timeout=170)
    assert tests.returncode == 0, out


def test_rights_that_the_page_names_are_enough(site: Site) -> None:
    """The Role in the documentation, for a user that may do nothing else; and a user that may do nothing."""
    import yaml

    found = re.search(r"```yaml\n(apiVersion: rbac.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    for each in yaml.safe_load_all(found[1]):
        each["metadata"].pop("namespace", None)
        if each["kind"] == "RoleBinding":
            each["subjects"] = [{"kind": "User", "name": "driver", "apiGroup": "rbac.authorization.k8s.io"}]
        kind = f"{each['kind'].lower()}s"
        site.cluster.ask(
            "POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{site.namespace}/{kind}", each
        )
    driver = site.cluster.write_kubeconfig("driver", namespace=site.namespace)
    plain = site.cluster.write_kubeconfig("plain", namespace=site.namespace)
    script = site.run(
        f"""
with launch("kubernetes", hosts=2, name="lab", **OPTIONS) as job:
    say(*where(job.hosts))
    say(*where(job.scale(1)))
refused(kubeconfig={str(plain)!r})
""",
        kubeconfig=str(driver),
        namespace=None,
    )
    assert heard(script) == "mesh-lab-0-0 | mesh-lab-0-1"
    assert heard(script) == "mesh-lab-0-0"
    said = heard(script)
    assert 'User "plain" cannot create resource "jobs"' in said
    ended(script)


def test_what_cannot_come_fails_at_once(site: Site) -> None:
    """K8S-2, in the words of who says so."""
    site.create("resourcequotas", {"metadata": {"name": "few"}, "spec": {"hard": {"requests.cpu": "3"}}})
    meshes: dict[str, dict[str, Any]] = {
        "image": {"image": "missing/mesh"},
        "python": {"python": "/nowhere/python"},
        "namespace": {"namespace": "nowhere"},
        "account": {"service_account": "nobody"},
        "amount": {"cpu": "lots"},
        "quota": {"hosts": 3, "cpu": 2},
        "node": {"gpus": 9, "unschedulable_timeout": 0},
        "queue": {"gpus": 9, "queue_timeout": 0.5},
        "token": {"kubeconfig": str(site.cluster.write_kubeconfig("admin", token="old"))},
        "context": {"context": "elsewhere"},
        "config": {"kubeconfig": "/nowhere/config"},
        "server": {"kubeconfig": str(nowhere(site))},
        "port": {"listen": "127.0.0.1:0"},
    }
    script = site.run(
        f"""
with launch("kubernetes", meshes={ {name: {"hosts": 1, **each} for name, each in meshes.items()}!r}, **OPTIONS) as job:
    whys = {{}}
    while len(whys) < {len(meshes)}:
        whys |= {{each.mesh: each.why for each in job.state().hosts if each.phase is Phase.FAILED}}
        time.sleep(0.01)
    import json
    say(json.dumps(whys))
""",
        cpu="0.1",
    )
    whys = json.loads(heard(script))
    assert whys["image"].startswith("its container does not start: ErrImagePull: ")
    assert "missing/mesh: not found" in whys["image"]
    assert whys["quota"].startswith("Kubernetes will not start it: FailedCreate: ")
    assert "exceeded quota: few, requested: requests.cpu=2, used: " in whys["quota"]
    assert whys["node"].startswith("Kubernetes finds no node for it: Unschedulable: 0/3 nodes")
    assert whys["queue"].startswith("it has waited 0.5 for a node and its container: ")
    for mesh, words in {
        "python": "/nowhere/python",
        "namespace": 'namespaces "nowhere" not found',
        "account": 'serviceaccount "nobody" not found',
        "amount": "quantities must match the regular expression",
        "token": "not valid or have expired; log in again",
        "context": "elsewhere",
        "config": "there is no kubeconfig /nowhere/config",
        "server": "cannot be reached",
        "port": "Connection refused. Run the script in the cluster",
    }.items():
        assert words in whys[mesh]
    ended(script)


def nowhere(site: Site) -> Path:
    """A kubeconfig of a server that is not there."""
    config = json.loads(site.cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://{site.cluster.main.address}:1"
    path = site.folder / "nowhere"
    path.write_text(json.dumps(config))
    return path


def test_hosts_that_wait_say_why(site: Site) -> None:
    """K8S-2: in the scheduler's words, and in those of a quota that others use up."""
    site.create("resourcequotas", {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "2"}}})
    script = site.run(
        """
with launch("kubernetes", hosts=1, name="huge", gpus=9, **OPTIONS) as huge:
    state(huge, "Insufficient")
    with launch("kubernetes", hosts=1, name="first", **OPTIONS) as first:
        first.wait(60)
        with launch("kubernetes", hosts=1, name="second", **OPTIONS) as second:
            state(second, "exceeded quota")
            first.stop()
            second.wait(60)
            say("runs")
"""
    )
    said = heard(script)
    assert said.startswith(
        "job huge: 0 of 1 hosts run; huge-0 waiting: Unschedulable: 0/3 nodes are available: "
    )
    assert "3 Insufficient nvidia.com/gpu" in said
    assert "second-0 waiting: FailedCreate: " in heard(script)
    assert heard(script) == "runs"
    ended(script)


def test_evicted_and_deleted_pods_are_failures(site: Site) -> None:
    script = site.run(
        """
with launch("kubernetes", hosts=4, name="lab", **OPTIONS) as job:
    say(*where(job.hosts))
    for count in (1, 2, 3):
        while len(failed(job)) < count:
            time.sleep(0.01)
        say(*sorted(failed(job))[-1])
    say(*where(job.scale(1)))
"""
    )
    assert heard(script).count("mesh-lab") == 4
    pods = {name: each["metadata"]["name"] for name, each in site.pods().items()}
    evicted = pods["mesh-lab-0-0"]
    site.create(
        f"pods/{evicted}/eviction",
        {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": evicted}},
    )
    assert heard(script).startswith("lab-0 | its pod was evicted: EvictionByEvictionAPI: ")
    site.cluster.ask("DELETE", f"{site.path}/pods/{pods['mesh-lab-0-1']}")
    assert heard(script).startswith("lab-1 | its pod was deleted")
    # As the kubelet says it when a node has no memory left.
    said = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    site.cluster.ask("PATCH", f"{site.path}/pods/{pods['mesh-lab-0-2']}/status", {"status": said})
    assert heard(script).startswith(
        "lab-2 | its pod has ended: Evicted: The node was low on resource: memory."
    )
    assert heard(script) == "mesh-lab-0-3"
    ended(script)


def test_an_eviction_comes_with_a_notice(site: Site) -> None:
    """HST-5: the agent gets SIGTERM and knows how long it has; whatever takes a pod away gives it that time."""
    script = site.run(
        """
with launch("kubernetes", hosts=1, name="lab", grace=20, **OPTIONS) as job:
    say(*environ(job.hosts, "MESH_PREEMPTION_GRACE"))
    say(failed(job)[0][1])
"""
    )
    assert heard(script) == "15"
    [pod] = site.pods().values()
    name = pod["metadata"]["name"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 20
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    site.create(f"pods/{name}/eviction", eviction)
    assert heard(script).startswith("its pod was evicted: EvictionByEvictionAPI: ")
    ended(script)
    [log] = site.cluster.folder.glob(f"**/pods/{pod['metadata']['uid']}/log")
    assert "SIGTERM" in log.read_text()


def test_nobody_else_brings_hosts_back_or_keeps_them(site: Site) -> None:
    """K8S-3: a Job of which nothing is heard is ended by Kubernetes; one that is deleted is over."""
    script = site.run(
        """
with launch("kubernetes", hosts=1, name="late", **OPTIONS) as late, launch("kubernetes", hosts=1, name="gone", **OPTIONS) as gone:
    late.wait(60), gone.wait(60)
    say("run")
    say(*failed(late)[0])
    say(*failed(gone)[0])
with launch("kubernetes", hosts=1, name="none", gpus=9, **OPTIONS) as none:
    state(none, "Insufficient")
    say(*failed(none)[0])
"""
    )
    assert heard(script) == "run"
    job = site.cluster.ask("GET", f"{site.jobs}/mesh-late-0")["spec"]
    assert job["activeDeadlineSeconds"] == 1200
    assert job["ttlSecondsAfterFinished"] == 300
    site.cluster.ask("PATCH", f"{site.jobs}/mesh-late-0", {"spec": {"activeDeadlineSeconds": 1}})
    assert heard(script).startswith("late-0 | its pod was ")
    site.cluster.ask("DELETE", f"{site.jobs}/mesh-gone-0", {"propagationPolicy": "Background"})
    assert heard(script).startswith("gone-0 | its pod was deleted")
    # The Secret and the Service go with their owner.
    wait_until(lambda: not [each for each in site.left() if "gone" in each], "something is left", LIMIT)
    assert "Insufficient" in heard(script)
    site.cluster.ask("DELETE", f"{site.jobs}/mesh-none-0", {"propagationPolicy": "Foreground"})
    assert heard(script).startswith("none-0 | its ")
    ended(script)


KEEPER = """
import asyncio, sys, tempfile
from pathlib import Path
from mesh_core import Credentials
from mesh_core.plugins import PluginManager
from mesh_launchers import *
from mesh_launchers import _kubernetes_group

async def keep(options):
    running = asyncio.Event()
    folder = Path(tempfile.mkdtemp(dir="."))
    hosts = Credentials.new(folder / "credentials").host_path
    place = Place("kept", folder, hosts, 12.0, lambda report: report.phase is Phase.RUNNING and running.set())
    plugin = PluginManager().get(LAUNCHERS, "kubernetes")
    await plugin.create(place).start(plugin.options(**options), [HostSpec(0, "kept-0")])
    await running.wait()
    print("runs", flush=True)
    await asyncio.sleep(600)

# Such a short silence is for a kubelet that sees changes at once.
_kubernetes_group._LEAST_SILENCE_S = 12.0
asyncio.run(keep(OPTIONS))
"""


def test_hosts_end_with_the_process_that_keeps_them(site: Site) -> None:
    """K8S-3: it puts their end off for as long as it lives; they end by themselves when it was killed."""
    keeper = site.cluster.script(f"OPTIONS = {site.options!r}\n{KEEPER}", site.folder)
    site.scripts.append(keeper)
    assert heard(keeper) == "runs"

    def job() -> dict[str, Any]:
        return site.cluster.ask("GET", f"{site.jobs}/mesh-kept-0")

    first = job()["spec"]["activeDeadlineSeconds"]
    wait_until(lambda: job()["spec"]["activeDeadlineSeconds"] >= first + 4, "its end is not put off", LIMIT)
    assert sum(len(hosts_on(each)) for each in site.cluster.nodes) == 1
    keeper.kill()
    # The host sees that its file does not change, before Kubernetes ends the Job.
    wait_until(lambda: not any(map(hosts_on, site.cluster.nodes)), "the host goes on", LIMIT)
    wait_until(lambda: job()["status"].get("conditions"), "the Job has not ended", LIMIT)
    # Kubernetes does this after five minutes.
    site.cluster.ask("DELETE", f"{site.jobs}/mesh-kept-0", {"propagationPolicy": "Foreground"})


def test_a_name_in_use(site: Site, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Another script's Job is left alone."""
    script = site.run(
        """
with launch("kubernetes", hosts=1, name="lab", **OPTIONS) as job:
    job.wait(60)
    say("runs")
    input()
    say(*where(job.hosts))
"""
    )
    assert heard(script) == "runs"
    other = Site.__new__(Site)
    other.cluster, other.options, other.scripts = site.cluster, site.options, site.scripts
    other.folder = tmp_path_factory.mktemp("other")
    second = other.run('refused(name="lab")')
    assert f"the namespace '{site.namespace}' has a Job 'mesh-lab-0' already" in heard(second)
    ended(second)
    assert script.stdin is not None
    script.stdin.write("\n")
    script.stdin.flush()
    assert heard(script) == "mesh-lab-0-0"
    ended(script)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_ends_while_hosts_start_leaves_nothing(site: Site, number: signal.Signals) -> None:
    script = site.run(
        """
with launch("kubernetes", hosts=2, name="waits", gpus=9, **OPTIONS), launch("kubernetes", hosts=1, **OPTIONS) as job:
    say("launched")
    job.wait(60)
    say("runs")
    time.sleep(600)
"""
    )
    assert heard(script) == "launched"
    wait_until(lambda: len(site.pods()) == 3, "no pods", LIMIT)
    script.send_signal(number)
    script.communicate(timeout=LIMIT)


def test_a_template_is_merged(site: Site) -> None:
    """Also a file's; what it takes away is gone, and hosts are found all the same."""
    template = site.folder / "pods.yaml"
    template.write_text(
        """
metadata:
  labels: {team: red, mesh-hosts: none}
spec:
  terminationGracePeriodSeconds: 7
  tolerations: null
  nodeSelector: {kubernetes.io/hostname: host2}
  containers:
  - name: host
    image: of-the-template
    env: [{name: COLOUR, value: red}]
"""
    )
    script = site.run(
        f"""
with launch("kubernetes", hosts=1, name="lab", template={str(template)!r}, **OPTIONS) as job:
    say(*where(job.hosts))
    input()
""",
        image=None,
        labels={"owner": "me"},
        annotations={"note": "kept"},
        shared_memory="1Gi",
        resources={"nvidia.com/gpu": 1},
        service=False,
    )
    assert heard(script) == "mesh-lab-0-0"
    [pod] = site.pods().values()
    metadata, spec = pod["metadata"], pod["spec"]
    assert (
        metadata["labels"] | {"team": "red", "owner": "me", "mesh-hosts": "mesh-lab-0"} == metadata["labels"]
    )
    assert metadata["annotations"]["note"] == "kept"
    assert (spec["nodeName"], spec["terminationGracePeriodSeconds"]) == ("host2", 7)
    assert "subdomain" not in spec
    [container] = spec["containers"]
    assert container["image"] == "of-the-template"
    assert {"name": "COLOUR", "value": "red"} in container["env"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    # The API server's own defaults took the place of ours.
    assert {each.get("tolerationSeconds") for each in spec["tolerations"]} == {300}
    assert not site.cluster.has(f"{site.path}/services/mesh-lab-0")
    ended(script)


def test_a_script_in_a_pod(site: Site) -> None:
    """With the rights of its service account, in its own namespace."""
    site.create("serviceaccounts", {"metadata": {"name": "driver"}})
    site.cluster.ask(
        "POST",
        f"/apis/rbac.authorization.k8s.io/v1/namespaces/{site.namespace}/rolebindings",
        {
            "metadata": {"name": "driver"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
            "subjects": [{"kind": "ServiceAccount", "name": "driver", "namespace": site.namespace}],
        },
    )
    options = {"image": "mesh", "python": sys.executable}
    script = site.folder / "inside.py"
    script.write_text(
        f"OPTIONS = {options!r}\n"
        + BEGIN
        + '    with launch("kubernetes", hosts=2, name="inner", **OPTIONS) as job:\n        say(*where(job.hosts))\n'
    )
    env = [{"name": "MESH_JOBS", "value": str(site.folder / "inner-jobs")}]
    container = {"name": "script", "image": "mesh", "command": [sys.executable, str(script)], "env": env}
    spec = {"serviceAccountName": "driver", "restartPolicy": "Never", "containers": [container]}
    site.create("pods", {"metadata": {"name": "the-script"}, "spec": spec})
    path = f"{site.path}/pods/the-script"

    def phase() -> str:
        return str(site.cluster.ask("GET", path)["status"]["phase"])

    wait_until(lambda: phase() in {"Succeeded", "Failed"}, "the script does not end", LIMIT)
    with site.cluster.main.network():
        said = site.cluster.api.text("GET", f"{path}/log")
    assert phase() == "Succeeded", said
    assert "mesh-inner-0-0 | mesh-inner-0-1" in said
    site.cluster.ask("DELETE", path)


def test_hosts_that_dial_out(site: Site) -> None:
    """Where the script cannot connect to pods: in their order, later ones too, and with a reason where they cannot connect to it."""
    script = site.run(
        f"""
with launch("kubernetes", hosts=2, name="lab", **OPTIONS) as job:
    say(*job.hosts.names, *job.hosts.spawn_procs(per_host={{"gpus": 1}}).spawn("w", Where).where.call().get(timeout=60).values())
    say([each.address for each in job.state().hosts])
    say(*where(job.scale(3)))
# Not the script's machine.
OPTIONS["dial"] = "{site.cluster.nodes[0].address}:9"
refused(start_timeout=2)
""",
        dial=f"{site.cluster.main.address}:26700",
    )
    assert heard(script) == "lab-0 | lab-1 | mesh-lab-0-0 | mesh-lab-0-1"
    assert heard(script) == "[None, None]"
    assert heard(script) == "mesh-lab-0-0 | mesh-lab-0-1 | mesh-lab-1-0"
    said = f"cannot connect to the script at {site.cluster.nodes[0].address}:9: Connection refused"
    assert said in heard(script)
    ended(script)


def test_a_lost_api_server_is_no_lost_host(site: Site) -> None:
    """K8S-4: one that is away is told of; the hosts go on, and are ended when it is back."""
    script = site.run(
        """
with launch("kubernetes", hosts=2, name="lab", **OPTIONS) as job:
    procs = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("where", Where)
    say(len(procs.where.call().get(timeout=60).values()))
    while not [each for each in job.state().hosts if "cannot be reached" in each.why or "has ended" in each.why]:
        time.sleep(0.01)
    say(len(procs.where.call().get(timeout=60).values()), {str(each.phase) for each in job.state().hosts})
    while any(each.why for each in job.state().hosts):
        time.sleep(0.01)
    say("back")
"""
    )
    assert heard(script) == "2"
    site.cluster.stop_server()
    try:
        assert heard(script) == "2 | {'running'}"
    finally:
        site.cluster.start_server()
    assert heard(script) == "back"
    ended(script)


def test_credentials_are_in_the_secret_alone(site: Site) -> None:
    """K8S-1: not in the Job, nor in what its pods are given or write; the Secret has them until the hosts run."""
    script = site.run(
        """
with launch("kubernetes", hosts=1, name="lab", gpus=9, **OPTIONS) as job:
    state(job, "Insufficient")
    input()
"""
    )
    heard(script)
    data = site.cluster.ask("GET", f"{site.path}/secrets/mesh-lab-0")["data"]
    told = json.loads(base64.b64decode(data["told"]))
    keys = [base64.b64decode(each).decode() for each in told["credentials"].values()]
    lines = [line for key in keys for line in key.splitlines() if len(line) > 40]
    assert lines
    for path in (f"{site.jobs}/mesh-lab-0", f"{site.path}/pods", f"{site.path}/events"):
        with site.cluster.main.network():
            text = site.cluster.api.text("GET", path)
        assert not [line for line in lines if line in text]
        assert not [each for each in told["credentials"].values() if each in text]
    ended(script)


def test_the_death_of_a_node(site: Site) -> None:
    """Its hosts have failed, and stopping the job does not wait for a node that is gone."""
    script = site.run(
        """
with launch("kubernetes", hosts=3, name="lab", one_per_node=True, grace=2, node_timeout=1, **OPTIONS) as job:
    say(*where(job.hosts))
    say(*failed(job)[0])
    say(*where(job.scale(2)))
"""
    )
    assert heard(script) == "mesh-lab-0-0 | mesh-lab-0-1 | mesh-lab-0-2"
    dead = site.cluster.nodes[1]
    [number] = [name[-1] for name, each in site.pods().items() if each["spec"]["nodeName"] == dead.name]
    dead.power_off()
    try:
        said = heard(script)
        assert said.startswith(f"lab-{number} | its pod was evicted: DeletionByTaintManager: ")
        assert heard(script) == " | ".join(f"mesh-lab-0-{each}" for each in "012" if each != number)
        ended(script)
    finally:
        dead.boot()
        site.cluster.kubelets[dead.name] = site.cluster.start_kubelet(dead)
        wait_until(lambda: len(site.cluster.ready_nodes()) == 3, "the node is not ready again", LIMIT)
