"""Options of users for hosts in Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh_launchers._dialing import check_dial
from mesh_launchers._durations import seconds

_ENDING_S = 5.0
"""The time that a host normally takes to end, at most."""


@dataclass(frozen=True)
class KubernetesOptions:
    """Options of the launcher ``kubernetes``."""

    image: str | None = None
    """The image of the hosts, with Python and mesh-core of the script's version. Required, unless the template names one."""
    python: str = "python3"
    """The interpreter in the image."""
    namespace: str | None = None
    """By default the namespace of the kubeconfig's context, or of the pod in which the script runs."""
    kubeconfig: str | None = None
    """A file; by default KUBECONFIG or ``~/.kube/config``, and without those the service account of the script's own pod."""
    context: str | None = None
    """A context of the kubeconfig; by default the current one."""
    cpu: str | float | None = None
    """Processors of each host, requested and limited, such as ``8`` or ``"500m"``."""
    memory: str | None = None
    """Memory of each host, requested and limited, such as ``"64Gi"``."""
    gpus: int | None = None
    """GPUs of each host: ``nvidia.com/gpu``. Others are named in ``resources``."""
    resources: Mapping[str, str | float] = field(default_factory=dict)
    """More resources, requested and limited, such as ``{"rdma/hca": 1}``."""
    one_per_node: bool = False
    """Whether two hosts of the job must never be on one node."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """More labels for the Job and its pods."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """More annotations for the Job and its pods."""
    service_account: str | None = None
    """The service account of the pods, whose token they then get; by default they get none."""
    image_pull_secrets: Sequence[str] = ()
    priority_class: str | None = None
    template: Mapping[str, Any] | str | None = None
    """Changes to the pods' template, or the name of a YAML file with them: mappings are merged, and so are lists of things with names."""
    service: bool = True
    """Whether to make a headless Service, by which hosts have names."""
    shared_memory: str | None = None
    """The size limit of ``/dev/shm``, such as ``"16Gi"``; by default a container runtime gives 64 MiB."""
    queue_timeout: float | str | None = None
    """The time after which a host whose container has not started has failed, such as ``"2h"``; by default hosts wait forever."""
    unschedulable_timeout: float | str | None = None
    """The time after which a host for which the scheduler has found no node has failed; 0 fails at once. By default it waits, as nodes may be added."""
    start_timeout: float = 120.0
    """Seconds until a host's agent listens, once its container has started."""
    node_timeout: float = 30.0
    """Seconds until the hosts of a node that Kubernetes has declared dead are given up; Kubernetes' own default is 300."""
    grace: float = 15.0
    """Seconds between SIGTERM and the kill (``terminationGracePeriodSeconds``), also for pods that are preempted, evicted or deleted."""
    preemption_grace: float | None = None
    """Seconds of `grace` that a host uses so that jobs can leave it; by default all but the last five, and 0 ends it at once."""
    listen: str = "0.0.0.0:0"
    """Where agents listen in their pods; ``"[::]:0"`` if pods have IPv6 addresses."""
    dial: str | None = None
    """HOST:PORT at which the script waits for hosts that it cannot connect to: an address of its machine, as pods reach it."""

    def __post_init__(self) -> None:
        """Check what Kubernetes would not check, or would report badly."""
        if self.dial is not None:
            check_dial(self.dial)
        if self.preemption_grace is not None and not 0 <= self.preemption_grace <= self.grace:
            raise ValueError(
                f"preemption_grace must be between 0 and grace, which is {self.grace:g}, got {self.preemption_grace:g}"
            )
        for name in ("queue_timeout", "unschedulable_timeout"):
            given = getattr(self, name)
            if given is not None and (given != 0 or name == "queue_timeout"):
                seconds(given, name)
        if self.image is None and self.template is None:
            raise TypeError(
                "the launcher 'kubernetes' needs image=: a container image with Python and mesh-core of the script's version"
            )

    def notice(self, grace: float) -> float:
        """Return how long a host continues after SIGTERM, if its pod is killed after `grace` seconds."""
        if self.preemption_grace is not None:
            return float(self.preemption_grace)
        return max(0.0, grace - _ENDING_S)

    def amounts(self) -> dict[str, str]:
        """Return the resources of a host by Kubernetes' names."""
        said = {"cpu": self.cpu, "memory": self.memory, "nvidia.com/gpu": self.gpus, **self.resources}
        return {name: str(amount) for name, amount in said.items() if amount is not None}
