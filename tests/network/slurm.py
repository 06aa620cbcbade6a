"""A Slurm cluster on the machines of a `Network`: a controller on the first, a node on each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster import Network, Process, wait_until

PROGRAMS = ("slurmctld", "slurmd", "srun", "squeue", "sinfo")
SPOOL = "/run/slurm"
"""Each machine has its own. A job's socket lies there, and the path of a folder of tests may be longer than that of a socket may be."""


def missing() -> str | None:
    """Why there can be none here, or None."""
    lacking = [each for each in PROGRAMS if shutil.which(each) is None]
    return f"there is no {lacking[0]}: apt install slurmctld slurmd slurm-client" if lacking else None


class Slurm:
    """The daemons, and their folder."""

    def __init__(self, network: Network, folder: Path, *, munge: bool = False) -> None:
        self.network = network
        self.folder = folder
        nodes = len(network.hosts) - 1
        (folder / "state").mkdir(parents=True)
        for host in network.hosts:
            host.run(["mkdir", "-p", SPOOL])
        (folder / "cgroup.conf").write_text("")
        (folder / "slurm.conf").write_text(
            "\n".join(
                [
                    "ClusterName=lab",
                    f"SlurmctldHost={network.hosts[0].name}",
                    "SlurmUser=root",
                    "SlurmdUser=root",
                    f"AuthType=auth/{'munge' if munge else 'none'}",
                    f"CredType=cred/{'munge' if munge else 'none'}",
                    f"StateSaveLocation={folder}/state",
                    f"SlurmdSpoolDir={SPOOL}",
                    f"SlurmctldPidFile={folder}/ctld.pid",
                    f"SlurmdPidFile={folder}/slurmd.%n.pid",
                    f"SlurmctldLogFile={folder}/ctld.log",
                    f"SlurmdLogFile={folder}/slurmd.%n.log",
                    "ProctrackType=proctrack/linuxproc",
                    "TaskPlugin=task/none",
                    "MpiDefault=none",
                    "JobAcctGatherType=jobacct_gather/none",
                    "SelectType=select/cons_tres",
                    "SelectTypeParameters=CR_Core",
                    "SlurmdParameters=config_overrides",
                    "AccountingStorageType=accounting_storage/none",
                    "ReturnToService=2",
                    "PreemptType=preempt/partition_prio",
                    "PreemptMode=CANCEL",
                    "SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=1",
                    "SlurmdTimeout=15",
                    # A node that is slow to answer would have its job put back into the queue, for two minutes.
                    "MessageTimeout=90",
                    "BatchStartTimeout=120",
                    "KillWait=5",
                    f"NodeName=host[1-{nodes}] CPUs=4 RealMemory=1000 State=UNKNOWN",
                    f"PartitionName=main Nodes=host[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1",
                    f"PartitionName=urgent Nodes=host[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=10",
                    "",
                ]
            )
        )
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[Process] = []
        if munge:
            self._authenticate()
        self.daemons.append(self._daemon(0, "slurmctld", "-D", "-i"))
        self.daemons += [self._daemon(at, "slurmd", "-D") for at in range(1, nodes + 1)]
        wait_until(
            lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split().count("idle") == nodes,
            "nodes are idle",
        )

    def _authenticate(self) -> None:
        """Have munge on each machine."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for at, host in enumerate(self.network.hosts):
            host.run(["mkdir", "-p", "/run/munge"])
            paths = [f"--{name}-file=/run/munge/{name}" for name in ("seed", "log", "pid")]
            self.daemons.append(
                self._daemon(at, "munged", "--foreground", "--force", f"--key-file={key}", *paths)
            )
        for host in self.network.hosts:
            wait_until(
                lambda host=host: host.run(["munge", "-n"], check=False).returncode == 0,  # type: ignore[misc]
                "munge answers",
            )

    def _daemon(self, host: int, *words: str) -> Process:
        with (self.folder / f"{words[0]}.{host}.log").open("ab") as log:
            return self.network.hosts[host].start(list(words), env=self.env, stdout=log, stderr=log)

    def ask(self, *words: str) -> str:
        """Return what a command says on the first machine."""
        done = self.network.hosts[0].run(list(words), env=self.env, check=False)
        return str(done.stdout)

    def script(self, text: str, *before: str, name: str = "script.py") -> Process:
        """Start a Python script on the first machine, with pipes, by what is to stand before it."""
        path = self.folder / name
        path.write_text(text)
        runtime = self.folder / "run"
        runtime.mkdir(exist_ok=True, mode=0o700)
        env = {**self.env, "MESH_JOBS": str(self.folder / "jobs"), "XDG_RUNTIME_DIR": str(runtime)}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        words = [*(before or [sys.executable]), path]
        return self.network.hosts[0].start(words, env=env, cwd=self.folder, text=True, **pipes)
