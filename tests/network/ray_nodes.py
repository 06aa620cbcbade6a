"""A Ray cluster on the machines of a `Network`: its head on the first, a node on each other."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster import Host, Network, Process, wait_until

TEMPORARY = "/run/ray"
"""Each machine has its own /run, which goes with it; short, as sockets lie there."""
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Ray's processes import so much that compiling it anew in each of them takes longer than Ray waits for them."""
ASKED = """
import logging, ray, sys
from ray.util import placement_group_table
ray.init(ADDRESS, log_to_driver=False, logging_level=logging.ERROR)
for line in sys.stdin:
    print("is", eval(line), flush=True)
"""
TRIES = 3
START_S = 150.0
"""Ray starts a dozen interpreters, which takes half a minute where others are at work."""


def missing() -> str | None:
    """Why there can be none here, or None."""
    return None if importlib.util.find_spec("ray") else "Ray is not installed: pip install ray"


class Ray:
    """The nodes, and their folder. The head offers nothing: hosts are on the others, one processor each."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.address = f"{network.hosts[0].address}:6379"
        (folder / "run").mkdir(parents=True, mode=0o700)
        # A token of its own, whatever this user's Ray has.
        self.env = {**COMPILED, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._scripts: list[Process] = []
        self._words: dict[str, tuple[str, ...]] = {}
        """How each node was started."""
        self._head(network.hosts[0])
        for host in network.hosts[1:]:
            self.add(host)
        # A node gives up if its own helpers take more than fifteen seconds to start, as they may on a busy machine.
        for host in network.hosts[1:]:
            self.wait_for(host)
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        words = [sys.executable, "-c", ASKED.replace("ADDRESS", repr(self.address))]
        # Not in the middle of a test, which would take it for something that was left.
        self._asked = network.hosts[0].start(words, env=self.env, text=True, **pipes)

    def _head(self, host: Host) -> None:
        self._start(host, "--head", "--port=6379", "--include-dashboard=false", "--num-cpus=0")
        self.wait_for(host)

    def add(self, host: Host) -> None:
        """Start a node."""
        self._start(host, f"--address={self.address}", "--num-cpus=1")

    def _start(self, host: Host, *words: str) -> None:
        self._words[host.name] = words
        common = [
            "--disable-usage-stats",
            "--num-gpus=0",
            "--include-log-monitor=false",
            "--object-store-memory=80000000",
            "--block",
        ]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common]
        command += [f"--node-ip-address={host.address}"]
        if "--head" in words:
            command.append(f"--temp-dir={TEMPORARY}")
        with self._log(host).open("wb") as log:
            host.start(command, env=self.env, stdout=log, stderr=log)

    def _log(self, host: Host) -> Path:
        return self.folder / f"{host.name}.log"

    def wait_for(self, host: Host) -> None:
        """Wait until a node has started. One that has given up is started again."""
        tries = TRIES

        def has_started() -> bool:
            nonlocal tries
            text = self._log(host).read_text()
            if "The current node timed out during startup" in text and tries:
                tries -= 1
                self._start(host, *self._words[host.name])
            return "Ray runtime started" in text

        wait_until(has_started, f"Ray does not start on {host.name}", START_S)

    def script(self, text: str, *before: str, host: int = 0, name: str = "script.py") -> Process:
        """Start a Python script on a machine, with pipes, by what is to stand before it."""
        path = self.folder / name
        path.write_text(text)
        env = {
            **self.env,
            "MESH_JOBS": str(self.folder / "jobs"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "RAY_ADDRESS": self.address,
        }
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        words = [*(before or [sys.executable]), path]
        script = self.network.hosts[host].start(words, env=env, cwd=self.folder, text=True, **pipes)
        self._scripts.append(script)
        return script

    def end_scripts(self) -> None:
        """Kill those that are left."""
        while self._scripts:
            self._scripts.pop().close()

    def ask(self, text: str) -> str:
        """Return what a Python expression is in a driver of the cluster."""
        assert self._asked.stdin is not None and self._asked.stdout is not None
        self._asked.stdin.write(f"{text}\n")
        self._asked.stdin.flush()
        while line := self._asked.stdout.readline():
            if line.startswith("is "):
                return str(line).removeprefix("is ").strip()
        raise AssertionError(f"the driver has ended that was asked for {text}")
