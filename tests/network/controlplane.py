"""A Kubernetes cluster on the machines of a `Network`: a real control plane on the first, a kubelet of the tests' own on each other.

API server, controllers and scheduler are the real ones, of one version (`tools/control_plane`); etcd is Debian's. A kubelet
(`programs/kubelet.py`) runs each pod as a process of its machine, in namespaces of its own, and nothing else of what a real one does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster import Host, Network, Process, wait_until
from kubeapi import Api, Refused

import control_plane

HERE = Path(__file__).parent
ADMIN = "token-of-the-admin"
PORT = 6443
_START_S = 120.0
_ETCD = "http://127.0.0.1:2379"
_PEER = "http://127.0.0.1:2380"


def missing() -> str | None:
    """Why there can be none here, or None."""
    if importlib.util.find_spec("kubernetes") is None:
        return "there is no Python package kubernetes here"
    if shutil.which("openssl") is None:
        return "there is no openssl: apt install openssl"
    return control_plane.missing() or None


class ControlPlane:
    """The daemons, and their folder."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self.main = network.hosts[0]
        self.nodes = network.hosts[1:]
        self.users = {"admin": ADMIN, "plain": "token-of-a-plain-user", "driver": "token-of-a-driver"}
        folder.mkdir(parents=True, exist_ok=True)
        for component in control_plane.COMPONENTS:
            (folder / component).symlink_to(control_plane.binary())
        self.processes: list[Process] = []
        self._write_keys()
        self.kubeconfig = self.write_kubeconfig("admin")
        self.api = Api(f"{self.main.address}:{PORT}", ADMIN, folder / "tls.crt")
        self._start()
        self.kubelets = {host.name: self.start_kubelet(host) for host in self.nodes}
        wait_until(self._is_ready, "the nodes are not ready", _START_S)

    def _write_keys(self) -> None:
        folder = self.folder
        names = f"subjectAltName=IP:{self.main.address},IP:127.0.0.1"
        certificate = f"-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kube-apiserver -addext {names}"
        for words in (
            f"genrsa -out {folder}/sa.key 2048",
            f"rsa -in {folder}/sa.key -pubout -out {folder}/sa.pub",
            f"req {certificate} -keyout {folder}/tls.key -out {folder}/tls.crt",
        ):
            subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
        lines = [f'{ADMIN},admin,admin,"system:masters"']
        lines += [f"{token},{name},{name}" for name, token in self.users.items() if name != "admin"]
        (folder / "tokens.csv").write_text("\n".join(lines) + "\n")

    def write_kubeconfig(self, user: str, *, namespace: str | None = None, token: str | None = None) -> Path:
        """Write a configuration for a user."""
        context = {"cluster": "lab", "user": user, **({"namespace": namespace} if namespace else {})}
        server = f"https://{self.main.address}:{PORT}"
        path = self.folder / f"kubeconfig-{user}-{namespace}-{token}"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "lab",
                    "clusters": [
                        {
                            "name": "lab",
                            "cluster": {
                                "server": server,
                                "certificate-authority": str(self.folder / "tls.crt"),
                            },
                        }
                    ],
                    "users": [{"name": user, "user": {"token": token or self.users[user]}}],
                    "contexts": [{"name": "lab", "context": context}],
                }
            )
        )
        return path

    def _start(self) -> None:
        folder = self.folder
        self._daemon(
            "etcd",
            {
                "data-dir": folder / "etcd",
                "unsafe-no-fsync": "true",
                "log-level": "warn",
                "listen-client-urls": _ETCD,
                "advertise-client-urls": _ETCD,
                "listen-peer-urls": _PEER,
                "initial-advertise-peer-urls": _PEER,
                "initial-cluster": f"default={_PEER}",
            },
        )
        self.start_server()
        common = {
            "kubeconfig": self.kubeconfig,
            "leader-elect": "false",
            "bind-address": "127.0.0.1",
        }
        self._daemon(
            folder / "kube-controller-manager",
            {
                **common,
                "cert-dir": folder / "controllers",
                "service-account-private-key-file": folder / "sa.key",
                "root-ca-file": folder / "tls.crt",
                "node-monitor-period": "1s",
                # Longer than a busy machine keeps a kubelet waiting.
                "node-monitor-grace-period": "15s",
            },
        )
        self._daemon(folder / "kube-scheduler", {**common, "cert-dir": folder / "scheduler"})

    def start_server(self) -> None:
        """Start the API server, and wait until it answers."""
        folder = self.folder
        self._server = self._daemon(
            folder / "kube-apiserver",
            {
                "etcd-servers": _ETCD,
                "bind-address": "0.0.0.0",
                "advertise-address": self.main.address,
                "secure-port": PORT,
                "cert-dir": folder / "server",
                "tls-cert-file": folder / "tls.crt",
                "tls-private-key-file": folder / "tls.key",
                "kubelet-client-certificate": folder / "tls.crt",
                "kubelet-client-key": folder / "tls.key",
                "service-cluster-ip-range": "10.96.0.0/24",
                "service-account-issuer": "https://kubernetes.default.svc",
                "service-account-signing-key-file": folder / "sa.key",
                "service-account-key-file": folder / "sa.pub",
                "token-auth-file": folder / "tokens.csv",
                "authorization-mode": "RBAC",
                "profiling": "false",
            },
        )
        with self.main.network():
            wait_until(self._answers, "the API server is not ready", _START_S)

    def stop_server(self) -> None:
        """Kill the API server: nobody is told."""
        self._server.kill()
        self._server.wait()

    def _daemon(self, program: str | Path, options: dict[str, Any]) -> Process:
        words = [f"--{name}={value}" for name, value in options.items()]
        with (self.folder / f"{Path(program).name}.log").open("ab") as log:
            process = self.main.start([program, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def _answers(self) -> bool:
        if self._server.poll() is not None:
            text = (self.folder / "kube-apiserver.log").read_text()
            raise AssertionError(f"the API server has ended: {text[-2000:]}")
        with contextlib.suppress(OSError, Refused):
            return self.api.text("GET", "/readyz") == "ok"
        return False

    def start_kubelet(self, host: Host) -> Process:
        """Have a machine be a node."""
        words = [self.folder, self.main.address, PORT, ADMIN, host.name, host.address]
        with (self.folder / f"kubelet-{host.name}.log").open("ab") as log:
            process = host.python(HERE / "programs" / "kubelet.py", *map(str, words), stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def _is_ready(self) -> bool:
        # Without its account, pods of a namespace are refused.
        return len(self.ready_nodes()) == len(self.nodes) and self.has(
            "/api/v1/namespaces/default/serviceaccounts/default"
        )

    def ready_nodes(self) -> set[str]:
        """The nodes that can have pods."""
        return {
            each["metadata"]["name"]
            for each in self.ask("GET", "/api/v1/nodes")["items"]
            if not each["spec"].get("taints")
            and any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in each["status"].get("conditions", [])
            )
        }

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        """Ask the API server, from its own machine."""
        with self.main.network():
            return self.api.ask(method, path, body, **query)

    def has(self, path: str) -> bool:
        """Whether something is there."""
        try:
            self.ask("GET", path)
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    def script(self, text: str, folder: Path, *before: str, name: str = "script.py", **env: str) -> Process:
        """Start a Python script on the first machine, with pipes, by what is to stand before it."""
        path = folder / name
        path.write_text(text)
        runtime = folder / "run"
        runtime.mkdir(exist_ok=True, mode=0o700)
        variables = {"MESH_JOBS": str(folder / "jobs"), "XDG_RUNTIME_DIR": str(runtime), **env}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        words = [*(before or [sys.executable]), path]
        return self.main.start(words, env=variables, cwd=folder, text=True, **pipes)
