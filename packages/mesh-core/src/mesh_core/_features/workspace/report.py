"""The report of a sync."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkspaceReport:
    """What :meth:`HostMesh.sync_workspace` did.

    >>> from mesh_core import WorkspaceReport
    >>> print(WorkspaceReport("/home/me/project", 2, 40, ("a.py",), 1200, 0, 0.25, ("a",)))
    40 files of /home/me/project on 2 hosts: 1 sent (1,200 bytes), 0 deleted, in 0.25 s; reloaded a
    """

    source: str
    """The directory that was synced."""
    hosts: int
    """How many hosts have it now."""
    files: int
    """How many files it has."""
    sent: tuple[str, ...]
    """The files whose content at least one host lacked, as paths below the directory."""
    sent_bytes: int
    """How many bytes of content were sent, counted once however many hosts there are."""
    deleted: int
    """How many files and directories were removed, on the host that removed the most."""
    seconds: float
    """How long it took."""
    reloaded: tuple[str, ...] = ()
    """The modules that at least one process reloaded."""
    kept: tuple[str, ...] = ()
    """What keeps its old code in some process although its module was reloaded, and why."""

    def __str__(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts:,} hosts"
        text = (
            f"{self.files:,} files of {self.source} on {hosts}: {len(self.sent):,} sent ({self.sent_bytes:,} bytes), "
            f"{self.deleted:,} deleted, in {self.seconds:.2f} s"
        )
        if self.reloaded:
            text += f"; reloaded {', '.join(self.reloaded)}"
        if self.kept:
            text += f"; still with old code: {'; '.join(self.kept)}"
        return text
