"""The kind is declared as it should be; the native writer, and one in plain Python, keep the contract."""

import ctypes
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mesh_snapshots import WRITERS, Writer, WriterCapabilities, WriterPlugin
from mesh_snapshots._native_writer import NATIVE, NativeWriter
from mesh_snapshots.testing import WriterConformance

from mesh_core import Future, Promise, wait
from mesh_core.plugins import ProbeResult
from mesh_core.testing import KindConformance, installed_plugins

MESH = Path(sysconfig.get_path("scripts"), "mesh")
SOON = 30.0


class TestKind(KindConformance):
    kind = WRITERS


class TestNative(WriterConformance):
    plugin = NATIVE
    distribution = "mesh-snapshots"


class PlainWriter:
    """A thread of Python for each file."""

    def write(self, path: str, data: bytes) -> Future[None]:
        promise = Promise[None](f"writing {path}")

        def run() -> None:
            part = Path(path + ".part")
            try:
                part.write_bytes(data)
                part.replace(path)
            except OSError as error:
                promise.set_exception(error)
            else:
                promise.set_result(None)

        threading.Thread(target=run).start()
        return promise.future


PLAIN = WriterPlugin(
    name="plain",
    api_version=1,
    create=PlainWriter,
    probe=lambda: ProbeResult.yes(WriterCapabilities(durable=False, takes_lock=True)),
    summary="a thread of Python for each file",
)


class TestPlain(WriterConformance):
    plugin = PLAIN
    distribution = "mesh-test-plugins"

    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        with installed_plugins(PLAIN):
            yield


class Careless:
    """Writes in place, and raises at once."""

    def write(self, path: str, data: bytes) -> Future[None]:
        Path(path).write_bytes(data)
        Path(path + ".log").touch()
        promise = Promise[None]()
        promise.set_result(None)
        return promise.future


def test_the_suite_fails_for_a_careless_writer(tmp_path: Path) -> None:
    careless: Writer = Careless()
    with pytest.raises(AssertionError):
        WriterConformance().test_what_is_written_is_in_the_file(careless, tmp_path)
    with pytest.raises(OSError, match="No such file"):
        WriterConformance().test_what_cannot_be_written_is_an_os_error(careless, tmp_path)


def test_mesh_plugins_lists_writers_with_their_capabilities() -> None:
    done = subprocess.run([MESH, "plugins", "--json"], capture_output=True, text=True, timeout=30, check=True)
    (native,) = (each for each in json.loads(done.stdout)["plugins"] if each["kind"] == "snapshot writer")
    assert (native["name"], native["capabilities"]) == ("native", {"durable": True, "takes_lock": False})


# The native part. A FIFO in the place of the file's first name holds its thread up, and says when it is there.


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Where a write to ``tmp_path / "file"`` begins."""
    os.mkfifo(tmp_path / "file.part")
    return tmp_path / "file.part"


def test_a_status_other_than_0_is_an_os_error_with_the_path(fifo: Path, tmp_path: Path) -> None:
    future = NativeWriter().write(str(tmp_path / "file"), b"data")
    with fifo.open("rb") as reader:
        assert reader.read() == b"data"
    with pytest.raises(OSError, match="Invalid argument") as raised:
        future.get(timeout=SOON)  # a FIFO cannot be waited for
    assert (raised.value.errno, raised.value.filename) == (errno.EINVAL, str(tmp_path / "file"))
    assert list(tmp_path.iterdir()) == []


def test_it_writes_while_the_interpreter_s_lock_is_held(fifo: Path, tmp_path: Path) -> None:
    reader = os.open(fifo, os.O_RDWR)
    try:
        read = ctypes.PyDLL(None).read  # blocks without giving the lock away
        future = NativeWriter().write(str(tmp_path / "file"), b"data")
        said = ctypes.create_string_buffer(4)
        assert read(reader, said, 4) == 4 and said.raw == b"data"
        assert isinstance(future.exception(timeout=SOON), OSError)
    finally:
        os.close(reader)


def test_nobody_needs_to_wait_for_it(fifo: Path, tmp_path: Path) -> None:
    cancelled = NativeWriter().write(str(tmp_path / "file"), b"data")
    cancelled.cancel()
    NativeWriter().write(str(tmp_path / "other"), b"data")
    gc.collect()
    with fifo.open("rb") as reader:
        assert reader.read() == b"data"
    while fifo.exists() or not (tmp_path / "other").exists():
        os.sched_yield()
    assert (tmp_path / "other").read_bytes() == b"data"


def test_neither_threads_nor_descriptors_are_left(tmp_path: Path) -> None:
    def count(what: str) -> int:
        return len(list(Path("/proc/self", what).iterdir()))

    NativeWriter().write(str(tmp_path / "first"), b"").get(timeout=SOON)
    threads, descriptors = count("task"), count("fd")
    futures = [NativeWriter().write(str(tmp_path / str(n % 50)), bytes(5000)) for n in range(50)]
    futures += [NativeWriter().write(str(tmp_path / "no" / str(n)), bytes(5000)) for n in range(50)]
    _, pending = wait(futures, timeout=SOON)
    assert not pending
    assert sum(future.exception() is None for future in futures) == 50
    while count("task") > threads:
        os.sched_yield()  # a thread is there for a moment after it has finished its promise
    assert count("fd") == descriptors


def test_a_process_that_is_killed_leaves_no_half_file(fifo: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = (
        "import sys; from mesh_snapshots._native_writer import NativeWriter\n"
        "NativeWriter().write(sys.argv[1], bytes(1_000_000)).get()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as writing, fifo.open("rb") as reader:
        assert len(reader.read(10)) == 10
        writing.send_signal(signal.SIGKILL)
        writing.wait(SOON)
    assert not path.exists()


def test_objects_that_are_not_promises_are_refused(tmp_path: Path) -> None:
    from mesh_snapshots import _native

    path = str(tmp_path / "file")
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        _native.write(object(), path, b"")
    handle = Promise[None]().native_handle()
    with pytest.raises(ValueError, match="embedded null byte"):
        _native.write(handle, "a\0b", b"")
    with pytest.raises(TypeError):
        _native.write(handle, path, "text")  # type: ignore[arg-type]  # on purpose
    assert list(tmp_path.iterdir()) == []


def test_a_build_without_a_compiler_says_what_is_missing(tmp_path: Path) -> None:
    package = Path(__file__).parents[1]
    for path in (package / "setup.py", package / "pyproject.toml", package / "README.md"):
        shutil.copy(path, tmp_path)
    shutil.copytree(package / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so"))
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"],
        cwd=tmp_path,
        env={**os.environ, "CC": str(tmp_path / "cc")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode != 0
    assert "It needs Linux, a C compiler (cc, or $CC) and the headers of Python" in done.stderr
    assert str(tmp_path / "cc") in done.stderr
