"""The output of ``squeue``, read by columns that were asked for: complete answers in JSON have another form in each version of Slurm."""

from __future__ import annotations

import re
from dataclasses import dataclass

FIELDS = "%T|%r|%N|%L"
"""State, reason, nodes, time left."""
_NEVER = frozenset(
    {
        "AccountNotAllowed",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "JobHeldAdmin",
        "JobHeldUser",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "launch_failed_requeued_held",
    }
)
"""Reasons of jobs that do not start by themselves. Limits of users and accounts are not among them: they pass as other jobs end."""
_ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "COMPLETING",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "STOPPED",
        "TIMEOUT",
    }
)
_LIST = re.compile(r"([^\[,]*)\[([^\]]*)\]")


@dataclass(frozen=True)
class Queued:
    """What Slurm says about a job; empty if it could not be asked, or does not know the job."""

    state: str = ""
    why: str = ""
    nodes: str = ""
    left: int | None = None
    """Seconds until its time limit, if it has one and runs."""

    @property
    def never_starts(self) -> bool:
        """Whether it waits for somebody to act."""
        return self.state == "PENDING" and self.why.replace(" ", "_") in _NEVER

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.state in _ENDED

    def __str__(self) -> str:
        """Return Slurm's own words."""
        return f"{self.state}: {self.why}" if self.why else self.state


def queued(answer: str) -> Queued:
    """Read an answer to :data:`FIELDS`, sorted by the jobs' numbers: of several jobs of a name the last is the newest.

    >>> queued("PENDING|Resources||1:00:00")
    Queued(state='PENDING', why='Resources', nodes='', left=None)
    """
    lines = [each.strip() for each in answer.splitlines() if each.strip()]
    if not lines:
        return Queued()
    state, why, nodes, left = [*lines[-1].split("|"), "", "", ""][:4]
    # A state may have more behind it, such as who has cancelled a job; nodes that do not answer have a mark.
    word = state.split()[0].rstrip("+") if state.split() else ""
    reason = why.strip().removeprefix("(").removesuffix(")")
    return Queued(
        word,
        "" if reason in ("None", "null") else reason,
        "" if nodes in ("(null)", "n/a") else nodes,
        _seconds(left) if word == "RUNNING" else None,
    )


def _seconds(left: str) -> int | None:
    """Read days-hours:minutes:seconds, where there is a limit.

    >>> _seconds("1-02:03:04"), _seconds("5:00"), _seconds("UNLIMITED"), _seconds("INVALID")
    (93784, 300, None, None)
    """
    days, dash, clock = left.strip().rpartition("-")
    parts = clock.split(":")
    if not all(each.isdecimal() for each in parts) or (dash and not days.isdecimal()):
        return None
    seconds = 0
    for each in parts:
        seconds = seconds * 60 + int(each)
    return seconds + (int(days) * 86400 if dash else 0)


def grace_of(config: str, partitions: str) -> float | None:
    """Return the seconds between SIGTERM and the kill, from what ``scontrol`` shows of the configuration and of partitions.

    Several partitions are shown if the job's is not known: the default one counts.

    >>> grace_of("KillWait                = 30 sec", "PartitionName=main Default=YES GraceTime=0 ...")
    30.0
    """
    waits = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    if waits is None:
        return None
    lines = [line for line in partitions.splitlines() if line.strip()]
    line = lines[0] if len(lines) == 1 else next((each for each in lines if " Default=YES" in each), "")
    grace = re.search(r"\bGraceTime=(\d+)", line)
    return float(max(int(waits[1]), int(grace[1]) if grace else 0))


def notice_in(output: str) -> str:
    """Return what Slurm has printed about the end of a job or step, the latest last; empty if nothing.

    >>> notice_in("slurmstepd: error: *** STEP 7.0 ON host1 CANCELLED AT 2026-11-28T10:00:00 DUE TO TIME LIMIT ***")
    'STEP 7.0 ON host1 CANCELLED AT 2026-11-28T10:00:00 DUE TO TIME LIMIT'
    """
    found = re.findall(r"\*\*\* ((?:JOB|STEP) [\w.+]+ ON [\w.-]+ [A-Z][\w :.,()-]*) \*\*\*", output)
    return found[-1] if found else ""


def hostnames(nodes: str) -> list[str]:
    """Return the names of a list of nodes. Not by ``scontrol``, which some sites do not have everywhere.

    >>> hostnames("login,host[1-3,07],rack[1-2]n[01-02]")
    ['login', 'host1', 'host2', 'host3', 'host07', 'rack1n01', 'rack1n02', 'rack2n01', 'rack2n02']
    """
    names: list[str] = []
    for each in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        found = [""]
        at = 0
        for part in _LIST.finditer(each):
            ends = [part[1] + number for number in _numbers(part[2])]
            found = [before + end for before in found for end in ends]
            at = part.end()
        names += [before + each[at:] for before in found]
    return names


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ranges, as long as the first of each is written."""
    numbers: list[str] = []
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        else:
            numbers.append(each)
    return numbers
