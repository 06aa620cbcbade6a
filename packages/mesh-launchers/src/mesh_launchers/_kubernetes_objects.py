"""The objects of hosts in Kubernetes: a Job, and a Secret and a Service that it owns.

K8S-1: the Job owns everything that was created for its hosts, so that deleting it leaves nothing. Kubernetes removes it some time after its hosts
have ended, and ends it at its deadline, which the launcher keeps extending. Credentials are in the Secret only, until all hosts run.

Why a Job rather than a StatefulSet: a StatefulSet would restart a host that has failed, under the same name but without its processes. An indexed
Job numbers its pods, leaves a failed one failed without ending the others (``backoffLimitPerIndex``), has a deadline, and is removed after its end.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh_launchers._errors import LaunchError
from mesh_launchers._host import command
from mesh_launchers._kubernetes_options import KubernetesOptions

Json = dict[str, Any]

CONTAINER = "host"
"""The container of the agent; a template may have others beside it."""
JOB_LABEL = "mesh-job"
GROUP_LABEL = "mesh-hosts"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
RUN = "mesh-run"
TOLD = "told"
BEAT = "beat"
FOLDER = "/run/mesh-host"
_VOLUME = "mesh-host"
_MEMORY = "mesh-memory"
_REMOVED_AFTER_S = 300
_LONGEST_NAME = 40
"""Kubernetes makes the names of pods from it, which have 63 characters at most."""
_LOST = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort"}


@dataclass(frozen=True)
class Names:
    """The names of the objects of some hosts."""

    name: str
    """The name of the Job, its Secret and its Service."""
    label: str
    """A label that they share with the other hosts of the launched job."""
    run: str
    """Identifies the launcher that has made them."""

    @classmethod
    def of(cls, job: str, group: int, run: str) -> Names:
        """Return the names for a job's hosts. Names that Kubernetes would not accept are changed, and stay different.

        >>> Names.of("train", 0, "").name
        'mesh-train-0'
        >>> Names.of("Train_1", 0, "").name
        'mesh-train-1-c2ff-0'
        """
        label = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")
        if label != job or len(label) > _LONGEST_NAME:
            digest = hashlib.sha256(job.encode()).hexdigest()[:4]
            label = f"{label[: _LONGEST_NAME - 5].rstrip('-')}-{digest}"
        return cls(f"mesh-{label}-{group}", label, run)

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which the objects are found."""
        return {"app.kubernetes.io/managed-by": "mesh", JOB_LABEL: self.label, GROUP_LABEL: self.name}


def job(names: Names, count: int, options: KubernetesOptions, after: float) -> Json:
    """Return the Job of some hosts, with a deadline in seconds from its start."""
    pods: Json = {
        "metadata": {"labels": dict(options.labels), "annotations": dict(options.annotations)},
        "spec": _pod(names, options),
    }
    if options.template is not None:
        pods = merge(pods, _template(options.template))
    # The template may add labels, but not remove ours.
    pods["metadata"]["labels"] = {**(pods["metadata"].get("labels") or {}), **names.labels}
    _check(pods)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": names.name,
            "labels": {**options.labels, **names.labels},
            "annotations": {**options.annotations, RUN: names.run},
        },
        "spec": {
            "completions": count,
            "parallelism": count,
            "completionMode": "Indexed",
            # A host that has ended is not restarted, and the others continue.
            "backoffLimitPerIndex": 0,
            "maxFailedIndexes": count,
            "activeDeadlineSeconds": int(after),
            "ttlSecondsAfterFinished": _REMOVED_AFTER_S,
            "template": pods,
        },
    }


def _pod(names: Names, options: KubernetesOptions) -> Json:
    volumes: list[Json] = [
        # Readable by whichever user the image runs as. The credentials are removed from it when all hosts run.
        {"name": _VOLUME, "secret": {"secretName": names.name, "defaultMode": 0o444}}
    ]
    mounts: list[Json] = [{"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}]
    if options.shared_memory is not None:
        volumes.append(
            {"name": _MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}
        )
        mounts.append({"name": _MEMORY, "mountPath": "/dev/shm"})
    container: Json = {
        "name": CONTAINER,
        "image": options.image,
        "command": [*command(options.python, names.name), f"{FOLDER}/{TOLD}"],
        "volumeMounts": mounts,
    }
    if amounts := options.amounts():
        container["resources"] = {"requests": amounts, "limits": amounts}
    spec: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(options.grace),
        "automountServiceAccountToken": options.service_account is not None,
        "containers": [container],
        "volumes": volumes,
        "tolerations": _tolerations(options),
    }
    more: Json = {
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        "nodeSelector": dict(options.node_selector),
        "imagePullSecrets": [{"name": each} for each in options.image_pull_secrets],
        # Hosts find each other by HOSTNAME.SUBDOMAIN.
        "subdomain": names.name if options.service else None,
    }
    if options.one_per_node:
        others = {
            "labelSelector": {"matchLabels": {JOB_LABEL: names.label}},
            "topologyKey": "kubernetes.io/hostname",
        }
        more["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [others]}}
    return spec | {key: value for key, value in more.items() if value}


def _tolerations(options: KubernetesOptions) -> list[Json]:
    given = [dict(each) for each in options.tolerations]
    said = {each.get("key") for each in given}
    return given + [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": int(options.node_timeout),
        }
        for key in _LOST
        if key not in said
    ]


def secret(names: Names, owner: Json, told: bytes) -> Json:
    """Return the Secret with the hosts' configuration, including the credentials."""
    return {
        **_owned("Secret", names, owner),
        "type": "Opaque",
        "data": {
            TOLD: base64.b64encode(told).decode(),
            BEAT: base64.b64encode(b"0").decode(),
        },
    }


def service(names: Names, owner: Json) -> Json:
    """Return the headless Service, by which DNS has a name for each host."""
    return {
        **_owned("Service", names, owner),
        "spec": {
            "clusterIP": "None",
            "selector": {GROUP_LABEL: names.name},
            # Hosts look for each other before their pods are ready.
            "publishNotReadyAddresses": True,
        },
    }


def _owned(kind: str, names: Names, owner: Json) -> Json:
    return {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {
            "name": names.name,
            "labels": names.labels,
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": owner["metadata"]["name"],
                    "uid": owner["metadata"]["uid"],
                }
            ],
        },
    }


def deadline(after: float) -> Json:
    """Return the change to the Job that sets its deadline, in seconds from its start."""
    return {"spec": {"activeDeadlineSeconds": int(after)}}


def beat(number: int, order: str = "") -> Json:
    """Return the change to the Secret that tells the hosts that the launcher is alive, and what they are to do."""
    return {"data": {BEAT: base64.b64encode(f"{number}\n{order}".encode()).decode()}}


def renewed(told: bytes) -> Json:
    """Return the change to the Secret that gives hosts that have not started yet other credentials."""
    return {"data": {TOLD: base64.b64encode(told).decode()}}


def without_credentials() -> Json:
    """Return the change to the Secret that removes the credentials."""
    return {"data": {TOLD: None}}


def merge(ours: Any, theirs: Any) -> Any:
    """Return an object with a user's changes, as ``kubectl patch`` merges them.

    Mappings are merged; a value of ``None`` removes a key. In lists of things with names (containers, variables, volumes), things with the same
    name are merged and others are added; other lists are replaced by the user's.

    >>> merge({"a": 1, "b": [{"name": "x", "v": 1}]}, {"a": None, "b": [{"name": "x", "w": 2}, {"name": "y"}]})
    {'b': [{'name': 'x', 'v': 1, 'w': 2}, {'name': 'y'}]}
    >>> merge({"args": ["a"]}, {"args": ["b"]})
    {'args': ['b']}
    """
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return theirs
    merged = dict(ours)
    for key, value in theirs.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, list) and isinstance(merged.get(key), list):
            merged[key] = _merge_lists(merged[key], value, _KEYS.get(key, "name"))
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def _merge_lists(ours: Sequence[Any], theirs: Sequence[Any], key: str) -> list[Any]:
    if not all(isinstance(each, Mapping) and key in each for each in [*ours, *theirs]):
        return list(theirs)
    merged = {each[key]: each for each in ours}
    for each in theirs:
        merged[each[key]] = merge(merged.get(each[key], {}), each)
    return list(merged.values())


def _template(given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Return a user's template; it is a pod's, or only its ``metadata`` and ``spec``."""
    if isinstance(given, str):
        import yaml

        try:
            given = yaml.safe_load(Path(given).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise LaunchError(f"the pod template cannot be read: {error}") from error
    if not isinstance(given, Mapping):
        raise LaunchError(f"the pod template must be a mapping with metadata and spec, got {given!r}")
    unknown = [each for each in given if each not in {"metadata", "spec", "apiVersion", "kind"}]
    if unknown:
        raise LaunchError(
            f"the pod template has {', '.join(map(str, unknown))}, which is no part of a pod: it has metadata and spec"
        )
    return {key: given[key] for key in ("metadata", "spec") if key in given}


def _check(pods: Json) -> None:
    """Restore what a template may have removed."""
    container: Json = next(
        (each for each in pods["spec"].get("containers") or [] if each["name"] == CONTAINER), {}
    )
    if not container.get("image"):
        raise LaunchError(
            f"the pod template names no image for the container {CONTAINER!r}, and there is no image="
        )
