"""Kubeconfigs that are read without the official client of Kubernetes, and those that are left to it."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_launchers._kubeconfig import plain_access

pytest.importorskip("yaml", reason="PyYAML is not installed here; kubernetes brings it")
pytest.importorskip("urllib3", reason="urllib3 is not installed here; kubernetes brings it")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have none, whatever this machine says."""
    for each in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "KUBECONFIG"):
        monkeypatch.delenv(each, raising=False)


def written(folder: Path, cluster: dict[str, Any], user: dict[str, Any], **more: Any) -> str:
    """Write a kubeconfig of two contexts, of which the second is another namespace."""
    contexts = {
        "main": {"cluster": "c", "user": "u"},
        "other": {"cluster": "c", "user": "u", "namespace": "lab"},
    }
    config = {
        "current-context": "main",
        "contexts": [{"name": name, "context": each} for name, each in contexts.items()],
        "clusters": [{"name": "c", "cluster": {"server": "https://one:6443", **cluster}}],
        "users": [{"name": "u", "user": user}],
        **more,
    }
    path = folder / "config"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_token_and_an_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are named from the folder of the kubeconfig; what stands in it comes first."""
    (tmp_path / "ca.crt").write_text("from a file")
    named = written(tmp_path, {"certificate-authority": "ca.crt"}, {"token": "t"})
    access = plain_access(named, None)
    assert access is not None
    assert (access.server, access.namespace, access.token) == ("https://one:6443", None, "t")
    assert access.authority == b"from a file"
    data = {
        "certificate-authority": "ca.crt",
        "certificate-authority-data": base64.b64encode(b"data").decode(),
    }
    monkeypatch.setenv("KUBECONFIG", written(tmp_path, data, {"token": "t"}))
    access = plain_access(None, "other")
    assert access is not None and (access.namespace, access.authority) == ("lab", b"data")


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        ({}, {"exec": {"command": "aws"}}),
        ({}, {"token": "t", "as": "somebody"}),
        ({}, {"username": "u", "password": "p"}),
        ({}, {}),
        ({}, {"client-certificate-data": "Yw=="}),
        ({}, {"token": "t", "client-key-data": "not base64"}),
        ({"insecure-skip-tls-verify": True}, {"token": "t"}),
        ({"proxy-url": "http://proxy"}, {"token": "t"}),
        ({"server": "http://one"}, {"token": "t"}),
        ({"certificate-authority": "missing.crt"}, {"token": "t"}),
    ],
    ids=lambda each: ",".join(each) or "nothing",
)
def test_what_is_left_to_the_official_client(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    assert plain_access(written(tmp_path, cluster, user), None) is None


def test_files_and_environments_that_are_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = written(tmp_path, {}, {"token": "t"})
    assert plain_access(good, None) is not None
    assert plain_access(good, "unknown") is None
    assert plain_access(str(tmp_path / "none"), None) is None
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert plain_access(good, None) is None
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("KUBECONFIG", f"{good}:{good}")
    assert plain_access(None, None) is None
    for text in ("[]", "{", "contexts: 7", ""):
        (tmp_path / "garbage").write_text(text)
        assert plain_access(str(tmp_path / "garbage"), None) is None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A server that wants a certificate, and answers with whom it has seen; and the files for it, in base64."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here: apt install openssl")
    for name, more in {"server": ["-addext", "subjectAltName=IP:127.0.0.1"], "client": []}.items():
        words = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
        ]
        words += ["-keyout", f"{name}.key", "-out", f"{name}.crt", *more]
        subprocess.run(words, check=True, cwd=tmp_path, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.load_verify_locations(tmp_path / "client.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1 << 16)
            who = dict(each[0] for each in secure.getpeercert()["subject"])["commonName"]  # type: ignore[index]
            secure.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(who)}\r\n\r\n{who}".encode())

    thread = threading.Thread(target=serve)
    thread.start()
    data = {each.name: base64.b64encode(each.read_bytes()).decode() for each in tmp_path.iterdir()}
    yield f"https://127.0.0.1:{listener.getsockname()[1]}", data
    thread.join()
    listener.close()


@pytest.mark.slow
def test_a_certificate_is_shown_to_the_server(tmp_path: Path, server: tuple[str, dict[str, str]]) -> None:
    address, data = server
    cluster = {"server": address, "certificate-authority-data": data["server.crt"]}
    user = {"client-certificate-data": data["client.crt"], "client-key-data": data["client.key"]}
    access = plain_access(written(tmp_path, cluster, user), None)
    assert access is not None
    pool = access.pool(4)
    assert pool.request("GET", address).data == b"client"
    pool.clear()
