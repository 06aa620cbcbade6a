"""Runs torchrun on machines of a `Network`: PyTorch is imported once, and each torchrun is a fork of this process.

    python torchruns.py

Each line of its input is JSON: the machine's process, a folder, a name, variables, and torchrun's arguments. In the folder, NAME.log has what
that torchrun writes, NAME.pid its number outside of the machine while it runs, and NAME.status how it has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed.run

sys.path.insert(0, str(Path(__file__).parents[1]))

import namespaces


def write(path: Path, number: int) -> None:
    """Have a file say a number; it is there with all that it says, or not."""
    new = path.with_suffix(".new")
    new.write_text(str(number))
    new.rename(path)


def start(told: dict[str, Any]) -> None:
    """Have a torchrun run, and a process that tells how it ends."""
    if os.fork():
        return
    namespaces.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    namespaces.join(os.pidfd_open(told["machine"]), namespaces.MACHINE)
    path = Path(told["folder"]) / told["name"]
    child = os.fork()
    if child == 0:
        run(told, path.with_suffix(".log"))
    write(path.with_suffix(".pid"), child)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    write(path.with_suffix(".status"), status)
    os._exit(0)


def run(told: dict[str, Any], log: Path) -> None:
    """Be a torchrun."""
    namespaces.die_with_parent()
    os.setsid()
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["env"])
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for fd, stream in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(fd, stream)
    status = 1
    try:
        sys.argv = ["torchrun", *told["words"]]
        torch.distributed.run.main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Start what is asked for, until the input ends."""
    # Nobody waits for the processes between.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        start(json.loads(line))


if __name__ == "__main__":
    main()
