"""What is kept of jobs for people who operate a machine: who has done what to them, and logs of bounded size.

AUD-1: each attach, exec, scale and stop is a line in a file that outlives the job; no log grows beyond its limit.
"""

from __future__ import annotations

import json
import os
import pwd
import time
from contextlib import suppress
from pathlib import Path

from mesh_core.extensions import naming
from mesh_launchers._folder import AUDIT, base, base_opened, open_audit

LIMIT = 1 << 24
"""A log that has more bytes than this is cut; the lines before are in another file beside it, once."""
_SHOWN = 200


def audit(job: str, pid: int, uid: int, did: str) -> None:
    """Add a line about a process that has done something to a job."""
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "job": job,
        "did": did,
        "user": _user(uid),
        "pid": pid,
        "command": _read(pid, "cmdline").replace("\0", " ").strip()[:_SHOWN],
        "from": _origin(pid),
    }
    with base_opened() as outer, naming(base() / AUDIT):
        with os.fdopen(open_audit(outer), "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            long = os.fstat(file.fileno()).st_size > LIMIT
        # Several keepers write to it: a line is in one of the two files, whoever renames it first.
        if long:
            with suppress(FileNotFoundError):
                os.rename(AUDIT, f"{AUDIT}.1", src_dir_fd=outer, dst_dir_fd=outer)


def cut(path: Path, limit: int = LIMIT) -> None:
    """Shorten a log that is too long. Those who write to it append, and go on. On a full disk this raises, and the log stays as it is."""
    if path.stat().st_size <= limit:
        return
    before = path.with_name(f"{path.name}.1")
    with path.open("r+b") as file:
        file.seek(-(limit // 2), os.SEEK_END)
        try:
            with naming(before):
                before.write_bytes(file.read())
        except OSError:
            # Of a full disk, a part of them takes what is left.
            with suppress(OSError):
                before.unlink()
            raise
        file.truncate(0)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _origin(pid: int) -> str:
    """Return the address of the machine from which somebody has logged in for a process."""
    for each in _read(pid, "environ").split("\0"):
        name, _, value = each.partition("=")
        if name == "SSH_CONNECTION":
            return value.partition(" ")[0]
    return "this machine"


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""  # it has ended
