"""How much of a machine's processor time others have taken while this process and its children ran."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


class Load:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic(), _busy(), _ours()

    def share_of_others(self) -> float:
        """The part of all processors' time that others were busy for, from 0 to 1; other virtual machines count."""
        began, busy, ours = self._began
        capacity = (time.monotonic() - began) * (os.cpu_count() or 1)
        others = (_busy() - busy) - (_ours() - ours)
        return min(1.0, max(0.0, others / capacity)) if capacity > 0 else 0.0


def _busy() -> float:
    """Seconds for which processors have worked, or were wanted and not had."""
    line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _ours() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
