"""Interpretation of what the API returns about a host's pod, as pure functions.

K8S-2: why a host waits, and why it has failed, is reported in the words of the scheduler, kubelet or controller that decided it. Hosts that cannot
start fail at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from mesh_launchers._contract import Phase
from mesh_launchers._kubernetes_objects import CONTAINER, INDEX_LABEL

Json = Mapping[str, Any]

_FINAL = {"InvalidImageName", "ErrImageNeverPull", "CreateContainerError", "RunContainerError"}
"""Reasons why a container does not start, and will not by itself."""
_PULLING = {"ErrImagePull", "ImagePullBackOff"}
_NO_IMAGE = re.compile(
    r"not ?found|does not exist|denied|unauthorized|forbidden|invalid reference", re.IGNORECASE
)
"""Reasons why pulling an image will fail again; a registry that is busy or down may answer later."""
_LOST = {"DeletionByTaintManager", "NodeLost"}
_SPOKEN = re.compile(r"^\d+:([+=])(.*)$")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-zA-Z]*)")
_UNITS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate(("K", "M", "G", "T", "P"), 1)},
}


@dataclass(frozen=True)
class Seen:
    """The meaning of a pod's status for its host."""

    phase: Phase
    """STARTING once the container runs."""
    why: str = ""
    unschedulable: bool = False
    """Whether the scheduler has found no node."""
    has_log: bool = False
    """Whether the container has a log that can be read."""


def index_of(pod: Json) -> int | None:
    """Return the index of a pod's host in its Job."""
    metadata = pod["metadata"]
    for said in (metadata.get("annotations") or {}, metadata.get("labels") or {}):
        if INDEX_LABEL in said:
            return int(said[INDEX_LABEL])
    return None


def look(pod: Json) -> Seen:
    """Return the meaning of a pod's status for its host."""
    status = pod.get("status") or {}
    container = _container(status)
    state = container.get("state") or {}
    disruption = _condition(status, "DisruptionTarget")
    has_log = bool(container.get("started") or "running" in state or "terminated" in state)
    if disruption.get("status") == "True":
        why = f"its pod was evicted: {_words(disruption)}"
        return Seen(Phase.FAILED, why, has_log=has_log and not is_lost(pod))
    if status.get("reason"):
        # The kubelet's own evictions, deadlines, and nodes that are shutting down.
        return Seen(Phase.FAILED, f"its pod has ended: {_words(status)}", has_log=has_log)
    if "terminated" in state:
        return Seen(Phase.FAILED, _end(state["terminated"]), has_log=True)
    if status.get("phase") in {"Failed", "Succeeded"}:
        return Seen(Phase.FAILED, f"its pod has ended: {_unfinished(status) or status['phase']}")
    if pod["metadata"].get("deletionTimestamp"):
        return Seen(Phase.FAILED, "its pod was deleted", has_log=has_log)
    if "running" in state:
        return Seen(Phase.STARTING)
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return Seen(
            Phase.WAITING, _words(scheduled), unschedulable=scheduled.get("reason") == "Unschedulable"
        )
    return _waiting(state.get("waiting") or {}, status)


def _waiting(waiting: Json, status: Json) -> Seen:
    reason = waiting.get("reason")
    if reason in _FINAL or (reason in _PULLING and _NO_IMAGE.search(waiting.get("message") or "")):
        return Seen(Phase.FAILED, f"its container does not start: {_words(waiting)}")
    return Seen(Phase.WAITING, _words(waiting) or _unfinished(status))


def is_lost(pod: Json) -> bool:
    """Return whether Kubernetes has given up a pod's node, so that nobody there ends the pod."""
    status = pod.get("status") or {}
    return _LOST & {status.get("reason"), _condition(status, "DisruptionTarget").get("reason")} != set()


def is_quiet(pod: Json) -> bool:
    """Return whether a pod waits without saying why; its events may say it."""
    waiting = (_container(pod.get("status") or {}).get("state") or {}).get("waiting") or {}
    return waiting.get("reason") in {None, "ContainerCreating", "PodInitializing"} and not waiting.get(
        "message"
    )


def _container(status: Json) -> Json:
    found = [each for each in status.get("containerStatuses") or [] if each["name"] == CONTAINER]
    return found[0] if found else {}


def _condition(status: Json, kind: str) -> Json:
    found = [each for each in status.get("conditions") or [] if each["type"] == kind]
    return found[0] if found else {}


def _words(said: Json) -> str:
    """Return a reason and a message as one."""
    return ": ".join(str(said[key]) for key in ("reason", "message") if said.get(key))


def _end(terminated: Json) -> str:
    code, reason = terminated.get("exitCode"), terminated.get("reason")
    if reason == "OOMKilled":
        return "its container was killed as it used more memory than its limit (OOMKilled)"
    message = f": {terminated['message']}" if terminated.get("message") else ""
    if terminated.get("signal"):
        return f"its container was ended by signal {terminated['signal']}{message}"
    named = f" ({reason})" if reason not in {None, "Error", "Completed"} else ""
    return f"its container has ended with status {code}{named}{message}"


def _unfinished(status: Json) -> str:
    """Return which container before the host's own has not finished."""
    for each in status.get("initContainerStatuses") or []:
        for state in (each.get("state") or {}).values():
            if state and state.get("reason") not in {None, "Completed"}:
                return f"init container {each['name']}: {_words(state)}"
    return ""


# Output of the hosts.


def spoken(text: str) -> dict[str, Any]:
    """Return the messages of a host's program in its log; later ones add to earlier ones."""
    said: dict[str, Any] = {}
    parts = ""
    for line in text.splitlines():
        if found := _SPOKEN.match(line):
            parts += found[2]
            if found[1] == "=":
                try:
                    said |= json.loads(parts)
                except ValueError:
                    pass  # something else has written a line like that
                parts = ""
    return said


def written(text: str, lines: int) -> str:
    """Return the last lines of a host's output, without those of its program.

    >>> written('0:={"over": 1}' + chr(10) + "listens", 5)
    'listens'
    """
    return "\n".join([line for line in text.splitlines() if not _SPOKEN.match(line)][-lines:])


# Events.


def refusal(events: Iterable[Json], hosts: int) -> tuple[str, bool]:
    """Return why a Job's pods are not created, by the newest event, and whether that is final."""
    words = newest(events, {"FailedCreate"})
    quota = re.search(r"exceeded quota: [^,]+, requested: (.+), used: .+, limited: (.+)$", words)
    if quota:
        # If the limit is below what all hosts need, waiting for other pods to end does not help.
        wanted, limits = _amounts(quota[1]), _amounts(quota[2])
        return words, any(wanted[name] * hosts > limits[name] for name in wanted.keys() & limits.keys())
    return words, "is forbidden" in words or "is invalid" in words


def newest(events: Iterable[Json], reasons: set[str] | None = None) -> str:
    """Return the text of the newest event about a problem."""
    found = [
        each
        for each in events
        if each.get("type") == "Warning" or each.get("reason") == "NotTriggerScaleUp"
        if reasons is None or each.get("reason") in reasons
    ]
    found.sort(key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "")
    return _words(found[-1]) if found else ""


def _amounts(text: str) -> dict[str, Decimal]:
    """Return amounts by resource: of ``cpu=500m,pods=1``.

    >>> _amounts("limits.memory=2Ki,pods=1")
    {'limits.memory': Decimal('2048'), 'pods': Decimal('1')}
    """
    amounts = {}
    for each in text.split(","):
        name, _, amount = each.partition("=")
        found = _QUANTITY.fullmatch(amount.strip())
        if found and found[2] in _UNITS:
            try:
                amounts[name.strip()] = Decimal(found[1]) * _UNITS[found[2]]
            except InvalidOperation:
                continue
    return amounts
