"""A kubelet for tests: a node of a real Kubernetes that runs each pod's first container as a process of its machine.

    python kubelet.py FOLDER SERVER PORT TOKEN NAME ADDRESS

It does what a launcher can tell apart from a real one's work: it says that the node is there, and renews that; it mounts Secrets, tokens of service accounts
and empty folders, and follows what changes in Secrets; it reports phases, conditions and states of containers; it ends pods that are deleted, with
their grace; it serves logs. There are no images: each is there but those whose names begin with `missing/`. The first container of a pod is run,
on the machine's own network.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.server
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kubeapi import Api, Refused

Json = dict[str, Any]

HERE = Path(__file__).parent
LOG_PORT = 10250
BEAT_S = 2.0
LEASE = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
CAPACITY = {"cpu": "4", "memory": "8Gi", "pods": "50", "ephemeral-storage": "100Gi", "nvidia.com/gpu": "2"}
SYSTEM = (
    "architecture", "bootID", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion", "machineID",
    "operatingSystem", "osImage", "systemUUID",
)  # fmt: skip


def now() -> str:
    """The time, as the API has it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def forever(work: Callable[[], None]) -> None:
    """Do something in a thread, again when it fails: the API server may be away."""

    def run() -> None:
        while True:
            try:
                work()
            except Exception:
                traceback.print_exc()
                time.sleep(0.2)

    threading.Thread(target=run, daemon=True).start()


class Kubelet:
    """One node."""

    def __init__(self, folder: Path, api: Api, name: str, address: str) -> None:
        self.folder = folder
        self.api = api
        self.name = name
        self.address = address
        self.pods: dict[str, Pod] = {}
        self.logs: dict[tuple[str, str], Path] = {}

    def start(self) -> None:
        """Be the node."""
        self.register()
        forever(self.beat)
        forever(self.follow)
        forever(self.refresh)
        self.serve()

    def register(self) -> None:
        """Say that the node is there, and what it has."""
        labels = {"kubernetes.io/hostname": self.name}
        node = {"metadata": {"name": self.name, "labels": labels}}
        while True:
            with contextlib.suppress(Refused):
                self.api.ask("POST", "/api/v1/nodes", node)
            try:
                self.tell(all_of_it=True)
            except (OSError, Refused):
                time.sleep(0.2)
            else:
                break

    def tell(self, *, all_of_it: bool = False) -> None:
        """Say that the node is ready."""
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        status: Json = {"conditions": [{**ready, "lastHeartbeatTime": now(), "lastTransitionTime": now()}]}
        if all_of_it:
            addresses = [("InternalIP", self.address), ("Hostname", self.name)]
            status |= {
                "capacity": CAPACITY,
                "allocatable": CAPACITY,
                "addresses": [{"type": kind, "address": value} for kind, value in addresses],
                "daemonEndpoints": {"kubeletEndpoint": {"Port": LOG_PORT}},
                "nodeInfo": dict.fromkeys(SYSTEM, "test"),
            }
        self.api.ask("PATCH", f"/api/v1/nodes/{self.name}/status", {"status": status})

    def beat(self) -> None:
        """Renew the node's lease and condition."""
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 10, "renewTime": now()}
        try:
            self.api.ask("PATCH", f"{LEASE}/{self.name}", {"spec": spec})
        except Refused as error:
            if error.status != 404:
                raise
            self.api.ask("POST", LEASE, {"metadata": {"name": self.name}, "spec": spec})
        self.tell()
        time.sleep(BEAT_S)

    def follow(self) -> None:
        """Look after the pods that are bound to this node."""
        pods = self.api.watch("/api/v1/pods", fieldSelector=f"spec.nodeName={self.name}", resourceVersion="0")
        for event in pods:
            if event["type"] == "ERROR":
                return
            self.see(event["object"], is_gone=event["type"] == "DELETED")

    def see(self, pod: Json, *, is_gone: bool) -> None:
        uid = pod["metadata"]["uid"]
        running = self.pods.get(uid)
        if is_gone:
            if running is not None:
                running.kill()
                del self.pods[uid]
        elif running is not None:
            running.see(pod)
        elif pod["metadata"].get("deletionTimestamp"):
            remove(self.api, pod)
        elif (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"}:
            self.pods[uid] = Pod(self, pod)

    def refresh(self) -> None:
        """Bring mounted Secrets up to date."""
        for each in list(self.pods.values()):
            each.refresh()
        time.sleep(1.0)

    def serve(self) -> None:
        """Give logs to the API server."""
        logs = self.logs

        class Logs(http.server.BaseHTTPRequestHandler):
            def log_message(self, *words: object) -> None:
                pass

            def do_GET(self) -> None:
                url = urllib.parse.urlparse(self.path)
                words, query = url.path.split("/"), dict(urllib.parse.parse_qsl(url.query))
                path = logs.get((words[2], words[3])) if words[1] == "containerLogs" else None
                if path is None:
                    self.send_error(404)
                    return
                data = path.read_bytes()
                if "tailLines" in query:
                    data = b"".join(data.splitlines(keepends=True)[-int(query["tailLines"]) :])
                if "limitBytes" in query:
                    data = data[: int(query["limitBytes"])]
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        server = http.server.ThreadingHTTPServer((self.address, LOG_PORT), Logs)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "tls.crt", self.folder / "tls.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.serve_forever()


class Pod:
    """One pod of this node."""

    def __init__(self, kubelet: Kubelet, pod: Json) -> None:
        self.kubelet = kubelet
        self.api = kubelet.api
        self.pod = pod
        self.namespace: str = pod["metadata"]["namespace"]
        self.name: str = pod["metadata"]["name"]
        self.hostname: str = pod["spec"].get("hostname") or self.name
        self.container: Json = pod["spec"]["containers"][0]
        self.folder = kubelet.folder / "pods" / pod["metadata"]["uid"]
        self.process: subprocess.Popen[bytes] | None = None
        self.ending = threading.Event()
        self.killed = False
        threading.Thread(target=self.run, daemon=True).start()

    def see(self, pod: Json) -> None:
        """Something about it has changed."""
        self.pod = pod
        if pod["metadata"].get("deletionTimestamp") and not self.ending.is_set():
            self.ending.set()
            if self.process is None:
                return
            grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
            threading.Timer(grace, self.kill).start()
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.ending.set()
        if self.process is not None and self.process.poll() is None:
            self.killed = True
            self.process.kill()

    def run(self) -> None:
        try:
            if self.prepare():
                self.live()
            self.ending.wait()
            # One that was killed with its machine's API server away is removed when that is back.
            while True:
                try:
                    remove(self.api, self.pod)
                    return
                except (OSError, Refused):
                    time.sleep(0.5)
        except Exception:
            traceback.print_exc()

    def prepare(self) -> bool:
        """Have all that the container needs; returns whether it is there."""
        image = self.container["image"]
        if image.startswith("missing/"):
            why = f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": {image}: not found'
            self.report("Pending", {"waiting": {"reason": "ErrImagePull", "message": why}})
            return False
        self.report("Pending", {"waiting": {"reason": "ContainerCreating"}})
        self.folder.mkdir(parents=True)
        while not self.ending.is_set():
            try:
                for each in self.pod["spec"].get("volumes") or []:
                    self.mount(each)
            except Refused as error:
                words = f'MountVolume.SetUp failed for volume "{each["name"]}": {error}'
                self.event("FailedMount", words)
                self.ending.wait(0.5)
            else:
                return True
        return False

    def mount(self, volume: Json) -> None:
        folder = self.folder / volume["name"]
        folder.mkdir(exist_ok=True)
        if "secret" in volume:
            secret = volume["secret"]
            self.write(folder, self.secret(secret["secretName"]), secret.get("defaultMode", 0o644))
        for source in (volume.get("projected") or {}).get("sources", []):
            self.write(folder, self.projected(source), 0o644, keep=True)

    def secret(self, name: str) -> dict[str, bytes]:
        found = self.api.ask("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{name}")
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    def projected(self, source: Json) -> dict[str, bytes]:
        """What the pod of a service account finds."""
        namespace = f"/api/v1/namespaces/{self.namespace}"
        if "serviceAccountToken" in source:
            bound = {"kind": "Pod", "apiVersion": "v1", "name": self.name, "uid": self.pod["metadata"]["uid"]}
            wanted = {"spec": {"boundObjectRef": bound, "expirationSeconds": 3600}}
            account = f"{namespace}/serviceaccounts/{self.pod['spec']['serviceAccountName']}/token"
            token = self.api.ask("POST", account, wanted)["status"]["token"]
            return {source["serviceAccountToken"]["path"]: token.encode()}
        if "configMap" in source:
            found = self.api.ask("GET", f"{namespace}/configmaps/{source['configMap']['name']}")["data"]
            return {each["path"]: found[each["key"]].encode() for each in source["configMap"]["items"]}
        return {each["path"]: self.namespace.encode() for each in source["downwardAPI"]["items"]}

    @staticmethod
    def write(folder: Path, files: dict[str, bytes], mode: int, *, keep: bool = False) -> None:
        for name, data in files.items():
            path = folder / name
            if not path.exists() or path.read_bytes() != data:
                new = folder / f".{name}"
                new.write_bytes(data)
                new.chmod(mode)
                new.rename(path)
        for path in folder.iterdir():
            if path.name not in files and not keep:
                path.unlink()

    def refresh(self) -> None:
        """Have mounted Secrets as they are now."""
        if self.process is not None and self.process.poll() is None:
            for each in self.pod["spec"].get("volumes") or []:
                if "secret" in each:
                    with contextlib.suppress(Refused):
                        self.mount(each)

    def live(self) -> None:
        """Run the container to its end."""
        words = [*(self.container.get("command") or []), *(self.container.get("args") or [])]
        if shutil.which(words[0]) is None:
            why = f'failed to create containerd task: exec: "{words[0]}": no such file or directory'
            self.report("Failed", {"terminated": {"exitCode": 128, "reason": "StartError", "message": why}})
            return
        log = self.folder / "log"
        mounts = {
            each["mountPath"]: str(self.folder / each["name"])
            for each in self.container.get("volumeMounts") or []
        }
        hosts = self.folder / "hosts"
        hosts.write_text(f"{Path('/etc/hosts').read_text()}{self.kubelet.address} {self.hostname}\n")
        mounts["/etc/hosts"] = str(hosts)
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    str(HERE / "container.py"),
                    self.hostname,
                    json.dumps(mounts),
                    *words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment(),
            )
        self.kubelet.logs[self.namespace, self.name] = log
        started = now()
        self.report("Running", {"running": {"startedAt": started}})
        if self.ending.is_set():
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait()
        if code < 0:
            code = 128 - code
        ended = {"exitCode": code, "startedAt": started, "finishedAt": now()}
        reason = "Completed" if code == 0 else "Error"
        self.report("Failed" if code else "Succeeded", {"terminated": {**ended, "reason": reason}})

    def environment(self) -> dict[str, str]:
        server, port = self.api.address.split(":")
        env = {
            "PATH": os.environ["PATH"],
            "HOME": "/root",
            "HOSTNAME": self.hostname,
            "KUBERNETES_SERVICE_HOST": server,
            "KUBERNETES_SERVICE_PORT": port,
        }
        metadata = self.pod["metadata"]
        for each in self.container.get("env") or []:
            field = (each.get("valueFrom") or {}).get("fieldRef")
            if field is None:
                env[each["name"]] = each.get("value", "")
                continue
            path: str = field["fieldPath"]
            if "['" in path:
                kind, key = path.removeprefix("metadata.").rstrip("']").split("['")
                env[each["name"]] = metadata[kind][key]
            else:
                env[each["name"]] = str(metadata[path.removeprefix("metadata.")])
        return env

    def report(self, phase: str, state: Json) -> None:
        """Say what has become of it."""
        is_ready = phase == "Running"
        kinds = {"Initialized": True, "ContainersReady": is_ready, "Ready": is_ready}
        container = {
            "name": self.container["name"],
            "image": self.container["image"],
            "imageID": "",
            "restartCount": 0,
            "ready": is_ready,
            "started": is_ready,
            "state": state,
        }
        status = {
            "phase": phase,
            "hostIP": self.kubelet.address,
            "podIP": self.kubelet.address,
            "podIPs": [{"ip": self.kubelet.address}],
            "startTime": now(),
            "conditions": [
                {"type": kind, "status": "True" if holds else "False", "lastTransitionTime": now()}
                for kind, holds in kinds.items()
            ],
            "containerStatuses": [container],
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/status"
        while True:
            try:
                uid = self.pod["metadata"]["uid"]
                self.api.ask("PATCH", path, {"metadata": {"uid": uid}, "status": status})
                return
            except Refused as error:
                if error.status not in {404, 409}:
                    raise
                return
            except OSError:
                time.sleep(0.5)

    def event(self, reason: str, message: str) -> None:
        """Tell something about it."""
        about = {
            "kind": "Pod",
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.pod["metadata"]["uid"],
        }
        event = {
            "metadata": {"generateName": f"{self.name}."},
            "involvedObject": about,
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": now(),
            "source": {"component": "kubelet", "host": self.kubelet.name},
        }
        with contextlib.suppress(Refused):
            self.api.ask("POST", f"/api/v1/namespaces/{self.namespace}/events", event)


def remove(api: Api, pod: Json) -> None:
    """Say that nothing of a pod is left: it is gone from then on."""
    metadata = pod["metadata"]
    # With a body, what the query says of the grace is not looked at.
    body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
    try:
        api.ask("DELETE", f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}", body)
    except Refused as error:
        if error.status not in {404, 409}:
            raise


def main() -> None:
    """Be a kubelet, until the machine ends."""
    folder, server, port, token, name, address = sys.argv[1:]
    api = Api(f"{server}:{port}", token, Path(folder) / "tls.crt")
    Kubelet(Path(folder), api, name, address).start()


if __name__ == "__main__":
    main()
