"""What the kernel's own records say of RDMA. They are exact at any moment, and name each thing.

The devices' packet counters are not used: the kernel reads them once per tick at most and repeats what it has read until
then, and they also count packets that were sent again because an answer was late.
"""

import json
import subprocess
from collections import Counter
from typing import Any

NUMBERS = {"mr": "mrn", "qp": "lqpn"}
PACKETS = 1 << 24
"""The numbers of packets start again from 0 after so many."""

Name = tuple[str, int]
"""A device, and a number that it does not give again soon."""


def _shown(kind: str) -> list[dict[str, Any]]:
    said = subprocess.run(
        ["rdma", "-j", "-dd", "resource", "show", kind], capture_output=True, text=True, check=True
    )
    # The kernel has some of other types. Whether a process is named says nothing: what an ended thread has made has none.
    return [each for each in json.loads(said.stdout) if each.get("type", "RC") == "RC"]


def resources(kind: str) -> set[Name]:
    """Return those of all processes: memory regions (`mr`) or queue pairs (`qp`)."""
    return {(each["ifname"], each[NUMBERS[kind]]) for each in _shown(kind)}


def queue_pairs() -> dict[Name, int]:
    """Return the number of the next packet that each queue pair will ask for.

    Only the reading and writing end asks. What it asks for again, it asks for by the same numbers.
    """
    return {(each["ifname"], each["lqpn"]): each["sq-psn"] for each in _shown("qp")}


def asked_since(before: dict[Name, int]) -> Counter[str]:
    """Return how many packets each device was asked for by the queue pairs that were there before."""
    asked = Counter[str]()
    for name, number in queue_pairs().items():
        if name in before:
            asked[name[0]] += (number - before[name]) % PACKETS
    return asked


def used_since(before: dict[Name, int]) -> set[str]:
    """Return the devices on which a queue pair was made, or has asked for something."""
    return {name[0] for name, number in queue_pairs().items() if before.get(name) != number}
