"""A virtual machine with Soft-RoCE devices, for tests of what needs InfiniBand verbs: they run on a real kernel driver.

It has this machine's own files, read-only, so that it sees the same checkout and the same environment; what is written there
is gone with it.

    PYTHONPATH=tools python -m soft_roce [--devices 2] [--limit 300] -- COMMAND...
"""

from soft_roce.image import CannotBoot, missing
from soft_roce.machine import run

__all__ = ["CannotBoot", "missing", "run"]
