"""Run in the virtual machine: for each engine a pytest, as the engine is chosen once for each process.

An interpreter takes seconds to start here, so one starts: the pytests are copies of it, and so are most processes that the tests
start, by way of fork servers.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[3] / "tools"))

from soft_roce import fork_server  # noqa: E402

SYSTEM = Path("/usr/lib/python3/dist-packages/pyverbs")
ENGINES = {
    "native": {"MESH_RDMA_VERBS": "native"},
    "pyverbs": {"MESH_RDMA_VERBS": "pyverbs"},
}
"""The engines, and how a process is told which one to take."""
TESTS = {
    "native": ["test_ibverbs.py", "test_each_other.py"],
    "pyverbs": ["test_pyverbs.py", "test_each_other.py"],
}
DMA_BUF = "SOFT_ROCE_DMA_BUF"
"""The variable with the libraries that have memory of a GPU: of CUDA, and of the devices. Without it there is none."""
if DMA_BUF in os.environ:
    cuda, verbs = os.environ[DMA_BUF].split(os.pathsep)
    ENGINES["gpu"] = {
        "MESH_RDMA_VERBS": "native",
        "MESH_RDMA_CUDA_LIBRARY": cuda,
        "MESH_RDMA_VERBS_LIBRARY": verbs,
    }
    TESTS["gpu"] = ["test_dma_buf.py"]
SERVERS = "SOFT_ROCE_SERVERS"
"""The variable with the folder where the fork servers listen, each under its engine's name."""

USED = [
    "mesh_rdma._native",
    "mesh_rdma._buffer",
    "mesh_rdma._explain",
    "mesh_rdma._gpu",
    "mesh_rdma._native_transports",
    "mesh_rdma.testing",
]
USED_BY_PYVERBS = [
    "mesh_rdma._pyverbs",
    *(f"pyverbs.{name}" for name in ("addr", "cq", "device", "enums", "mr", "pd", "qp", "wr")),
]
USED_BY_PYTEST = [
    "pytest",
    "unittest",
    *(f"_pytest.{name}" for name in ("doctest", "faulthandler", "fixtures", "junitxml", "logging")),
]

OPTIONS = ["-q", "--durations=8", "--timeout=480", "-ppytest_timeout", "-pno:cacheprovider"]


def programs():
    """What a fork server's processes can be."""
    from mesh_rdma.testing._owner import main as owner

    spec = importlib.util.spec_from_file_location("peer", HERE.parent / "peer.py")
    peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)

    def gpu(leave_out="", **environment):
        os.environ.pop(leave_out, None)
        os.environ.update(environment)
        sys.argv[1:] = ["gpu"]
        owner()

    return {
        "owner": owner,
        "peer": peer.main,
        "gpu": gpu,
        "gpu_of_a_plain_device": lambda: gpu("MESH_RDMA_VERBS_LIBRARY"),
        "gpu_of_an_old_driver": lambda: gpu(MESH_CUDA_STAND_IN_FAIL="cuMemGetHandleForAddressRange=801"),
    }


def load(names):
    for name in names:
        importlib.import_module(name)
    # Else each copy would have its own of all that is only looked at.
    gc.collect()
    gc.freeze()


def told(what):
    since = Path("/proc/uptime").read_text().split()[0]
    sys.stdout.write(f"soft_roce: {since} s after the start: {what}\n")
    sys.stdout.flush()


def serve(folder, engine):
    """Start the engine's fork server; return its number."""

    def prepare():
        os.environ.update(ENGINES[engine])
        load(USED_BY_PYVERBS if engine == "pyverbs" else [])

    return fork_server.start(folder / engine, programs(), prepare)


def test(results, engine):
    """Start the tests of the engine; return the number of their process."""
    if pid := os.fork():
        return pid
    import pytest

    os.environ.update(ENGINES[engine])
    # The names of the engines are those of the fork servers, too.
    os.environ["SOFT_ROCE_ENGINE"] = engine
    report = f"--junitxml={results / engine}.xml"
    files = [str(HERE / name) for name in TESTS[engine]]
    sys.exit(pytest.main([*OPTIONS, report, *sys.argv[1:], *files]))


def main():
    told("Python runs")
    results, folder = Path(os.environ["SOFT_ROCE_SHARE"]), Path(tempfile.mkdtemp())
    # The system's Python may be another one of the same version; of its packages this is the only one that is wanted.
    (folder / "packages").mkdir()
    (folder / "packages" / "pyverbs").symlink_to(SYSTEM)
    sys.path.append(str(folder / "packages"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[-1], os.environ.get("PYTHONPATH")]))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ[SERVERS] = str(folder)
    load(USED)
    told("mesh_rdma is imported")
    servers = [serve(folder, engine) for engine in ENGINES]
    load(USED_BY_PYTEST)
    told("pytest is imported")
    for engine in ENGINES:
        os.waitpid(test(results, engine), 0)
        told(f"the tests of {engine} have ended")
    fork_server.end(*servers)


if __name__ == "__main__":
    main()
