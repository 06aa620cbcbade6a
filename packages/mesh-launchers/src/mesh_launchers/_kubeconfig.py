"""A simple kubeconfig: it names the API server, and authenticates by a token or a certificate.

The official client reads any kubeconfig, but takes 0.6 s of processor time to import, a third of what three pods take to start. So it is
only used for what it alone can do: plugins that get tokens, proxies, several files, and whatever else in the file is not known here.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_CLUSTER = {"server", "certificate-authority", "certificate-authority-data"}
_USER = {"token", "client-certificate", "client-certificate-data", "client-key", "client-key-data"}


@dataclass(frozen=True)
class Access:
    """How to reach an API server, for the user of a namespace."""

    server: str
    namespace: str | None
    token: str | None
    authority: bytes | None
    """The authority that signs the server's certificate, in PEM; if empty, those that this machine trusts."""
    certificate: bytes | None
    key: bytes | None

    def pool(self, size: int) -> Any:
        """Return connections to the server; so many are kept."""
        import urllib3

        options: dict[str, Any] = {"cert_reqs": "CERT_REQUIRED", "maxsize": size}
        if self.authority is not None:
            options["ca_cert_data"] = self.authority.decode()
        if self.certificate is not None and self.key is not None:
            options |= {"cert_file": _in_memory(self.certificate), "key_file": _in_memory(self.key)}
        return urllib3.PoolManager(**options)


def plain_access(file: str | None, context: str | None) -> Access | None:
    """Read a kubeconfig, or the default one if none is named; ``None`` if the official client has to do it."""
    paths = (file or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")).split(os.pathsep)
    if len(paths) != 1 or any(os.environ.get(each) for each in _PROXIES):
        return None
    try:
        import urllib3  # noqa: F401
        import yaml
    except ImportError:
        return None
    path = Path(paths[0]).expanduser()
    try:
        return _access(yaml.safe_load(path.read_text()), context, path.parent)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        # The official client reports what is wrong.
        return None


def _access(config: Mapping[str, Any], context: str | None, folder: Path) -> Access | None:
    chosen = _named(config["contexts"], context or config["current-context"])["context"]
    cluster = _named(config["clusters"], chosen["cluster"])["cluster"]
    user = _named(config["users"], chosen["user"])["user"]
    if (
        not cluster.keys() <= _CLUSTER
        or not user.keys() <= _USER
        or not cluster["server"].startswith("https://")
    ):
        return None
    token = user.get("token")
    access = Access(
        cluster["server"],
        chosen.get("namespace"),
        token,
        _content(cluster, "certificate-authority", folder),
        _content(user, "client-certificate", folder),
        _content(user, "client-key", folder),
    )
    if (access.certificate is None) != (access.key is None) or (token is None and access.key is None):
        return None
    return access


def _named(entries: list[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    [found] = [each for each in entries if each["name"] == name]
    return found


def _content(of: Mapping[str, str], key: str, folder: Path) -> bytes | None:
    """Return a value of the file, or of one that it names; inline data takes precedence."""
    if (data := of.get(f"{key}-data")) is not None:
        return base64.b64decode(data, validate=True)
    return None if (name := of.get(key)) is None else (folder / name).read_bytes()


def _in_memory(data: bytes) -> str:
    """Return a path to this content, which is in no folder: Python's TLS reads keys from files only."""
    file = os.memfd_create("mesh-kubeconfig", os.MFD_CLOEXEC)
    os.write(file, data)
    return f"/proc/self/fd/{file}"
