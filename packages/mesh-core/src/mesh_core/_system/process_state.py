"""Whether a process of this host can run at the moment."""


def is_stopped(pid: int | None) -> bool:
    """Return whether a signal or a debugger has stopped the process, so that it cannot answer."""
    if pid is None:
        return False
    from pathlib import Path

    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1] in ("T", "t")
    except OSError:
        return False
