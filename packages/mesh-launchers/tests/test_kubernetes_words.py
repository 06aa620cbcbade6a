"""What the launcher kubernetes makes of what Kubernetes says, from status objects in Kubernetes' own formats: K8S-2. And how hosts in containers end: K8S-3."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mesh_core import Credentials
from mesh_core.plugins import PluginManager
from mesh_launchers import LAUNCHERS, Phase, _program
from mesh_launchers._contract import HostSpec, Place, options_of
from mesh_launchers._errors import LaunchError
from mesh_launchers._host import told
from mesh_launchers._kubernetes_objects import Names, job
from mesh_launchers._kubernetes_options import KubernetesOptions
from mesh_launchers._kubernetes_pods import index_of, is_quiet, look, newest, refusal, spoken, written

LIMIT = 30.0


def pod(state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    container = {"name": "host", "started": False, "state": state or {}}
    return {"metadata": {}, "status": {"containerStatuses": [container], **status}}


@pytest.mark.parametrize(
    ("given", "phase", "why"),
    [
        ({"metadata": {}}, Phase.WAITING, ""),
        (
            pod(
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                    }
                ]
            ),
            Phase.WAITING,
            "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (pod({"waiting": {"reason": "ContainerCreating"}}), Phase.WAITING, "ContainerCreating"),
        (
            pod({"waiting": {"reason": "ImagePullBackOff", "message": "429 Too Many Requests"}}),
            Phase.WAITING,
            "ImagePullBackOff: 429 Too Many Requests",
        ),
        (
            pod({"waiting": {"reason": "ErrImagePull", "message": "pull access denied for x"}}),
            Phase.FAILED,
            "its container does not start: ErrImagePull: pull access denied for x",
        ),
        (
            pod({"waiting": {"reason": "InvalidImageName", "message": "couldn't parse image name"}}),
            Phase.FAILED,
            "its container does not start: InvalidImageName: couldn't parse image name",
        ),
        (pod({"running": {"startedAt": "now"}}), Phase.STARTING, ""),
        (
            pod({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, phase="Failed"),
            Phase.FAILED,
            "its container was killed as it used more memory than its limit (OOMKilled)",
        ),
        (
            pod(
                {"terminated": {"exitCode": 128, "reason": "StartError", "message": "no such file"}},
                phase="Failed",
            ),
            Phase.FAILED,
            "its container has ended with status 128 (StartError): no such file",
        ),
        (
            pod({"terminated": {"exitCode": 0, "reason": "Completed"}}, phase="Running"),
            Phase.FAILED,
            "its container has ended with status 0",
        ),
        (
            pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
            Phase.FAILED,
            "its pod has ended: Evicted: The node was low on resource: memory.",
        ),
        (
            pod(
                {"running": {}},
                conditions=[
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                        "message": "default-scheduler: preempting to accommodate a higher priority pod",
                    }
                ],
            ),
            Phase.FAILED,
            "its pod was evicted: PreemptionByScheduler: default-scheduler: preempting to accommodate a higher priority pod",
        ),
        (
            pod(
                phase="Failed",
                initContainerStatuses=[
                    {"name": "fetch", "state": {"terminated": {"reason": "Error", "message": "no data"}}}
                ],
            ),
            Phase.FAILED,
            "its pod has ended: init container fetch: Error: no data",
        ),
        (
            {**pod({"running": {}}), "metadata": {"deletionTimestamp": "now"}},
            Phase.FAILED,
            "its pod was deleted",
        ),
    ],
)
def test_pods_are_described_in_kubernetes_words(given: dict[str, Any], phase: Phase, why: str) -> None:
    seen = look(given)
    assert (seen.phase, seen.why) == (phase, why)


def test_only_the_hosts_own_container_counts() -> None:
    given = pod({"running": {}})
    given["status"]["containerStatuses"].insert(
        0, {"name": "proxy", "state": {"terminated": {"exitCode": 1}}}
    )
    assert look(given).phase is Phase.STARTING


def test_a_pod_that_waits_without_a_word_is_quiet() -> None:
    assert is_quiet(pod({"waiting": {"reason": "ContainerCreating"}}))
    assert not is_quiet(pod({"waiting": {"reason": "ImagePullBackOff", "message": "429"}}))


def test_pods_are_numbered_by_older_and_newer_clusters() -> None:
    key = "batch.kubernetes.io/job-completion-index"
    assert index_of({"metadata": {"annotations": {key: "2"}}}) == 2
    assert index_of({"metadata": {"labels": {key: "0"}}}) == 0
    assert index_of({"metadata": {}}) is None


def event(
    message: str, reason: str = "FailedCreate", when: str = "1", kind: str = "Warning"
) -> dict[str, Any]:
    return {"type": kind, "reason": reason, "message": message, "lastTimestamp": when}


def test_a_quota_that_is_used_up_may_be_free_later() -> None:
    text = (
        'Error creating: pods "a" is forbidden: exceeded quota: few, requested: limits.memory=2Gi,pods=1, '
        "used: limits.memory=6Gi,pods=3, limited: limits.memory=8Gi,pods=4"
    )
    assert refusal([event(text)], hosts=4) == (f"FailedCreate: {text}", False)
    assert refusal([event(text)], hosts=5)[1]


def test_what_is_forbidden_or_invalid_stays_so() -> None:
    assert refusal([event('pods "a" is forbidden: violates PodSecurity "restricted"')], 1)[1]
    assert not refusal([event("Internal error: failed calling webhook: timeout")], 1)[1]
    assert refusal([event("Created pod", "SuccessfulCreate", kind="Normal")], 1) == ("", False)


def test_the_newest_event_speaks() -> None:
    autoscaler = event(
        "pod didn't trigger scale-up: 1 max node group size reached", "NotTriggerScaleUp", "3", "Normal"
    )
    events = [
        event("old", when="1"),
        autoscaler,
        event("older", when="0"),
        event("pulled", "Pulled", "9", "Normal"),
    ]
    assert newest(events) == "NotTriggerScaleUp: pod didn't trigger scale-up: 1 max node group size reached"


def test_messages_of_a_host_are_read_from_its_log() -> None:
    lines = [
        '2:+{"environment": {"py',
        "listens at",
        '2:=thon": "3"}}',
        '2:={"address": "tcp://0.0.0.0:7"}',
        "1:=no",
    ]
    text = "\n".join(lines)
    assert spoken(text) == {"environment": {"python": "3"}, "address": "tcp://0.0.0.0:7"}
    assert written(text, 3) == "listens at"


def test_options_are_checked_at_once() -> None:
    plugin: Any = PluginManager().get(LAUNCHERS, "kubernetes")
    with pytest.raises(TypeError, match="needs image="):
        options_of(plugin, {})
    with pytest.raises(TypeError, match="did you mean 'image'"):
        options_of(plugin, {"imagee": "mesh"})
    with pytest.raises(ValueError, match="queue_timeout must be"):
        KubernetesOptions(image="mesh", queue_timeout="soon")
    for template, words in (
        ({"containers": []}, "no part of a pod"),
        ("/nowhere/pods.yaml", "cannot be read"),
        ({"spec": {"containers": [{"name": "host", "image": None}]}}, "names no image"),
    ):
        if isinstance(template, str) and importlib.util.find_spec("yaml") is None:
            continue
        with pytest.raises(LaunchError, match=words):
            job(Names.of("lab", 0, "run"), 1, KubernetesOptions(image="mesh", template=template), 60)


def test_a_job_is_shown_before_it_is_submitted() -> None:
    plugin: Any = PluginManager().get(LAUNCHERS, "kubernetes")
    shown = json.loads(plugin.show(KubernetesOptions(image="mesh", cpu=2), "Train_1", 3, 1))
    assert (shown["metadata"]["name"], shown["spec"]["completions"]) == ("mesh-train-1-c2ff-1", 3)
    [container] = shown["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "2"}


def test_credentials_are_readable_by_any_user_of_the_image_and_writable_by_none() -> None:
    made = job(Names.of("lab", 0, "run"), 1, KubernetesOptions(image="mesh"), 60)
    [secret] = [each["secret"] for each in made["spec"]["template"]["spec"]["volumes"] if "secret" in each]
    assert secret["defaultMode"] == 0o444


def test_the_probe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = PluginManager().get(LAUNCHERS, "kubernetes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = plugin.probe()
    assert not found.available
    assert "pip install 'mesh-launchers[kubernetes]'" in (found.remedy or "")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    credentials = Credentials.new(tmp_path / "credentials")
    return Place("lab", tmp_path, credentials.host_path, 3.0, print)


def started(place: Place, *before: str) -> subprocess.Popen[str]:
    """Start a host as a container does: with what it is told in a file, and no standard input."""
    path, beat = place.folder / "told", place.folder / "beat"
    beat.write_text("0")
    path.write_bytes(told(place, [HostSpec(0, "lab-0")], beat=str(beat), address="127.0.0.1:0"))
    words = [*before, sys.executable, _program.__file__, "mesh-host", "lab", str(path)]
    host = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    while "address" not in host.stdout.readline():
        assert host.poll() is None
    return host


@pytest.mark.full
@pytest.mark.slow
def test_a_host_without_standard_input_ends_when_its_file_stays_as_it_is(place: Place) -> None:
    with started(place) as host:
        begun = time.monotonic()
        # It goes on as long as the file changes, for longer than it may be silent.
        count = 0
        while time.monotonic() - begun < 1.5 * place.silence:
            count += 1
            (place.folder / "beat").write_text(str(count))
            with pytest.raises(subprocess.TimeoutExpired):
                host.wait(0.4)
        # Its credentials are not read again.
        (place.folder / "told").unlink()
        since = time.monotonic()
        out, _ = host.communicate(timeout=LIMIT)
        assert time.monotonic() - since > 0.5 * place.silence
    assert '"over"' in out


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of processes are made by root only")
def test_the_first_process_of_a_container_ends_its_agent_in_order(place: Place) -> None:
    with started(place, "unshare", "--pid", "--fork", "--mount-proc") as outer:
        [child] = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        assert outer.wait(LIMIT) == 128 + signal.SIGTERM
    # The kernel kills what is left, and says nothing; the agent's own folder is gone because it ended by itself.
    assert not list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("mesh-*"))


def test_the_grace_of_a_preemption_is_a_part_of_the_whole() -> None:
    for given in (0, 15.0):
        assert KubernetesOptions(image="mesh", preemption_grace=given).notice(15.0) == given
    for wrong in (-math.nextafter(0.0, 1.0), math.nextafter(15.0, 16.0)):
        with pytest.raises(ValueError, match="preemption_grace must be between 0 and grace, which is 15"):
            KubernetesOptions(image="mesh", preemption_grace=wrong)
    assert [KubernetesOptions(image="mesh").notice(grace) for grace in (15.0, 5.0, 4.0)] == [10.0, 0.0, 0.0]


def test_a_host_may_fail_at_once_if_no_node_is_found_but_not_in_the_queue() -> None:
    assert KubernetesOptions(image="mesh", unschedulable_timeout=0).unschedulable_timeout == 0
    with pytest.raises(ValueError, match="queue_timeout must be"):
        KubernetesOptions(image="mesh", queue_timeout=0)


def test_names_of_up_to_forty_letters_stay_as_they_are() -> None:
    assert Names.of("x" * 40, 0, "").label == "x" * 40
    shortened = Names.of("x" * 41, 0, "").label
    assert len(shortened) == 40
    assert shortened.startswith("x" * 35 + "-")


def test_names_are_such_as_kubernetes_takes() -> None:
    long = Names.of("x" * 64, 3, "run")
    assert len(long.name) <= 52
    assert Names.of("a.b", 0, "").label != Names.of("a-b", 0, "").label
    assert json.dumps(long.labels)
