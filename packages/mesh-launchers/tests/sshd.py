"""Real sshd processes on loopback addresses, with keys of their own, and a client's configuration for them."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from launched import command_lines

from mesh_launchers import Job, launch

SSHD = shutil.which("sshd") or next((each for each in ("/usr/sbin/sshd",) if os.access(each, os.X_OK)), None)
LIMIT = 20.0


class Servers:
    """Servers with the names b1, b2 and so on, at 127.0.0.1, 127.0.0.2 and so on."""

    def __init__(self, folder: Path, count: int, *lines: str) -> None:
        assert SSHD is not None
        self.folder = folder
        self.names = [f"b{at}" for at in range(1, count + 1)]
        self.config = folder / "config"
        folder.mkdir(parents=True)
        # What a daemon that was started by an init would have made.
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        self._key("client")
        (folder / "authorized_keys").write_text((folder / "client.pub").read_text())
        self.processes: list[subprocess.Popen[bytes]] = []
        known, blocks = [], []
        for at, name in enumerate(self.names, 1):
            address, port = f"127.0.0.{at}", free_port(f"127.0.0.{at}")
            public = self._key(name)
            known.append(f"[{address}]:{port} {public}")
            blocks.append(f"Host {name}\n  HostName {address}\n  Port {port}")
            self.processes.append(self._start(name, address, port, lines))
            self._wait(address, port, self.processes[-1])
        (folder / "known_hosts").write_text("\n".join(known) + "\n")
        self.config.write_text("\n".join([*blocks, "Host *", *self._settings()]) + "\n")

    def _settings(self) -> list[str]:
        return [
            f"  IdentityFile {self.folder}/client",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.folder}/known_hosts",
            "  GlobalKnownHostsFile /dev/null",
            "  StrictHostKeyChecking yes",
        ]

    def _key(self, name: str) -> str:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return " ".join((self.folder / f"{name}.pub").read_text().split()[:2])

    def _start(self, name: str, address: str, port: int, lines: tuple[str, ...]) -> subprocess.Popen[bytes]:
        config = self.folder / f"{name}.conf"
        config.write_text(
            "\n".join(
                [
                    f"ListenAddress {address}:{port}",
                    f"HostKey {self.folder}/{name}",
                    f"AuthorizedKeysFile {self.folder}/authorized_keys",
                    "AuthenticationMethods publickey",
                    "PasswordAuthentication no",
                    "KbdInteractiveAuthentication no",
                    "UsePAM no",
                    "StrictModes no",
                    "PermitRootLogin prohibit-password",
                    "PidFile none",
                    "UseDNS no",
                    f"SetEnv XDG_RUNTIME_DIR={os.environ['XDG_RUNTIME_DIR']}",
                    *lines,
                    "",
                ]
            )
        )
        with (self.folder / f"{name}.log").open("ab") as log:
            # Its absolute path is what it starts itself by again.
            return subprocess.Popen(
                [os.path.realpath(str(SSHD)), "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, address: str, port: int, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + LIMIT
        while True:
            try:
                socket.create_connection((address, port)).close()
                return
            except OSError:
                assert process.poll() is None and time.monotonic() < until, "sshd does not listen"
                time.sleep(0.01)

    def launch(self, **options: Any) -> Job:
        """Launch a job with these servers as its hosts."""
        return launch("ssh", hosts=self.names, config=str(self.config), python=sys.executable, **options)

    def clients(self, name: str) -> list[int]:
        """Return the ssh processes that are connected to a server."""
        return [
            pid
            for pid, words in command_lines().items()
            if words[0] == b"ssh" and {os.fsencode(self.config), os.fsencode(name)} <= set(words)
        ]

    def forget(self, name: str) -> None:
        """Have the client know another key for a server."""
        path = self.folder / "known_hosts"
        at = self.names.index(name)
        lines = path.read_text().splitlines()
        other = (self.folder / "client.pub").read_text().split()[:2]
        lines[at] = " ".join([lines[at].split()[0], *other])
        path.write_text("\n".join(lines) + "\n")

    def close(self) -> None:
        """End all."""
        for each in self.processes:
            each.kill()
            each.wait()


def free_port(address: str) -> int:
    """Return a port that nobody has, and that the kernel gives to nobody who wants any."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(given // 2, given)
        with suppress(OSError), socket.socket() as one:
            one.bind((address, port))
            return port
