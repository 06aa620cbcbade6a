"""A Kubernetes control plane for tests: API server, controllers and scheduler, built once from their Go modules.

Debian has no package of them. The binary is kept in the user's cache folder, by version, and holds all three components; each runs when the
binary is started under its name. `python tools/control_plane` builds it; the tests only look for it, as a build takes minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = "1.36.3"
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_MAIN = Path(__file__).with_name("main.go")
_SERVER = "k8s.io/kubernetes"
_STAGED = re.compile(r"^\s*(?:replace\s+)?(k8s\.io/[\w\-/]+)\s*=>\s*\./staging", re.MULTILINE)
_GO = Path("/usr/local/go/bin/go")


class BuildError(RuntimeError):
    """The binary could not be built, and why."""


def folder() -> Path:
    """Return where builds are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mesh" / "control-plane"


def binary() -> Path:
    """Return where the binary of this version is, or will be once it is built."""
    source = hashlib.sha256(_MAIN.read_bytes()).hexdigest()[:8]
    return folder() / f"kubernetes-{VERSION}-{source}"


def missing() -> str:
    """Return why there is no control plane here; an empty text if there is one."""
    if not binary().exists():
        return f"there is no Kubernetes control plane in {folder()}; build one with `python3 tools/control_plane`"
    if shutil.which("etcd") is None:
        return "there is no etcd here; install Debian's etcd-server"
    return ""


def build() -> Path:
    """Build the binary unless it is there already, and return its path."""
    target = binary()
    if target.exists():
        return target
    go = shutil.which("go") or (str(_GO) if _GO.exists() else None)
    if go is None:
        raise BuildError("there is no Go here: install Go 1.26 or newer")
    with _lock():
        # Another process may have built it in the meantime.
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix="build-", dir=folder()) as where:
                _build(go, Path(where), target)
    return target


@contextmanager
def _lock() -> Iterator[None]:
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(go: str, where: Path, target: Path) -> None:
    shutil.copy(_MAIN, where)
    (where / "go.mod").write_text(_modules(go, where))
    version = f"-X k8s.io/component-base/version.gitVersion=v{VERSION}"
    made = where / "made"
    _run(where, "nice", "-n", "10", go, "build", "-trimpath", "-ldflags", f"-s -w {version}", "-o", str(made))
    # In one step, so that a build that is interrupted leaves nothing that looks finished.
    made.rename(target)


def _modules(go: str, where: Path) -> str:
    """Return go.mod. The server's own replaces its sibling modules by folders of its repository; here they are the published ones."""
    found = json.loads(_run(where, go, "mod", "download", "-json", f"{_SERVER}@v{VERSION}"))
    server = Path(found["GoMod"]).read_text()
    language = re.search(r"^go (\S+)$", server, re.MULTILINE)
    if language is None:
        raise BuildError(f"the go.mod of {_SERVER} names no version of Go")
    published = "v0" + VERSION.removeprefix("1")
    replaced = "".join(f"\t{name} => {name} {published}\n" for name in sorted(set(_STAGED.findall(server))))
    return (
        f"module controlplane\n\ngo {language[1]}\n\nrequire {_SERVER} v{VERSION}\n\nreplace (\n{replaced})\n"
    )


def _run(where: Path, *command: str) -> str:
    # Modules are added to go.mod as the build finds that it needs them.
    env = os.environ | {"GOFLAGS": "-mod=mod -buildvcs=false", "CGO_ENABLED": "0"}
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise BuildError(f"`{' '.join(command)}` has failed with status {done.returncode}:\n{last}")
    return done.stdout
