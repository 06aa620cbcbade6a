"""Promises that native code finishes, on threads that never take the GIL (CMP-2, CMP-3)."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import Script

from mesh_core import BrokenPromise, MeshError, Promise, gather, get_include, wait

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]

SOON = 30.0

SOURCE = """\
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <mesh_core/promise.h>

struct work {
    const struct mesh_promise *promise;
    int gate;     /* read before finishing */
    int status;
    int finishes; /* or else it only lets go */
    int out;      /* what finish() has said goes here */
};

static void *run(void *argument) {
    struct work *work = argument;
    char byte;
    int32_t said = 100;
    if (read(work->gate, &byte, 1) < 0) return NULL;
    if (work->finishes) said = work->promise->finish(work->promise, work->status);
    work->promise->release(work->promise);
    if (write(work->out, &said, sizeof said) < 0) return NULL;
    free(work);
    return NULL;
}

int start(const struct mesh_promise *promise, int gate, int status, int finishes, int out) {
    struct work *work = malloc(sizeof *work);
    pthread_t thread;
    *work = (struct work){promise, gate, status, finishes, out};
    promise->retain(promise);
    if (pthread_create(&thread, NULL, run, work)) return -1;
    return pthread_detach(thread);
}

int finish(const struct mesh_promise *promise, int status) {
    return promise->version == MESH_PROMISE_VERSION ? promise->finish(promise, status) : -100;
}

static const struct mesh_promise *kept;

void keep(const struct mesh_promise *promise) {
    promise->retain(promise);
    kept = promise;
}

/* Runs when the process exits, after the interpreter has gone. */
__attribute__((destructor)) static void last(void) {
    if (kept) {
        printf("finished %d\\n", kept->finish(kept, 0));
        kept->release(kept);
        fflush(stdout);
    }
}
"""


class Native:
    """The C code above, and a pipe that lets its threads continue."""

    def __init__(self, library: Path) -> None:
        # PyDLL keeps the GIL, so a call of `finish` cannot work only because the GIL was released.
        self.library = ctypes.PyDLL(str(library))
        self.library.keep.argtypes = (ctypes.c_void_p,)
        for function in (self.library.start, self.library.finish):
            function.argtypes = (
                ctypes.c_void_p,
                *[ctypes.c_int] * (4 if function is self.library.start else 1),
            )
        self.pointer = ctypes.pythonapi.PyCapsule_GetPointer
        self.pointer.restype, self.pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        self.gate = os.pipe()
        self.out = os.pipe()

    def start(self, promise: Promise[Any], status: int, finishes: bool = True) -> None:
        """Start a thread that finishes the promise, or drops its handle, once it may continue."""
        capsule = promise.native_handle()
        pointer = self.pointer(capsule, b"mesh_core.promise")
        assert self.library.start(pointer, self.gate[0], status, finishes, self.out[1]) == 0

    def go_on(self, count: int = 1) -> None:
        """Let this many threads continue."""
        os.write(self.gate[1], b"x" * count)

    def said(self) -> int:
        """What a thread's `finish` returned."""
        return int.from_bytes(os.read(self.out[0], 4), "little", signed=True)

    def close(self) -> None:
        for fd in (*self.gate, *self.out):
            os.close(fd)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("native")
    (folder / "promise.c").write_text(SOURCE)
    made = folder / "promise.so"
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-pthread",
            "-I",
            get_include(),
            "-o",
            str(made),
            str(folder / "promise.c"),
        ],
        check=True,
    )
    return made


@pytest.fixture
def native(library: Path) -> Iterator[Native]:
    found = Native(library)
    yield found
    found.close()


@pytest.mark.parametrize("name", ["cc -std=c99", "c++ -std=c++11"])
def test_the_header_compiles_alone(name: str, tmp_path: Path) -> None:
    compiler, standard = name.split()
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    source = tmp_path / ("alone.c" if compiler == "cc" else "alone.cpp")
    source.write_text(
        "#include <mesh_core/promise.h>\n#include <mesh_core/promise.h>\nstruct mesh_promise *unused;\n"
    )
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run(
        [compiler, standard, *warnings, "-fsyntax-only", "-I", get_include(), str(source)], check=True
    )


def test_a_native_thread_wakes_the_waiter(native: Native) -> None:
    promise = Promise[None]()
    native.start(promise, 0)
    native.go_on()
    assert promise.future.get(timeout=SOON) is None
    assert native.said() == 0


def test_a_native_thread_finishes_while_the_gil_is_held(native: Native) -> None:
    promise = Promise[None]()
    native.start(promise, 0)
    read = ctypes.PyDLL(None).read  # blocks without releasing the GIL
    native.go_on()
    said = ctypes.create_string_buffer(4)
    assert read(native.out[0], said, 4) == 4 and said.raw == bytes(4)
    assert promise.future.done()


def test_the_value_is_made_once_by_the_thread_that_looks(native: Native) -> None:
    asked = []

    def look(status: int) -> str:
        asked.append((status, threading.current_thread()))
        return f"status {status}"

    promise = Promise[str](finish=look)
    native.start(promise, -7)
    native.go_on()
    assert native.said() == 0
    assert promise.future.done() and asked == []
    assert promise.future.get() == "status -7" == promise.future.get()
    assert asked == [(-7, threading.current_thread())]


def test_one_of_many_readers_makes_the_value(native: Native) -> None:
    asked, got = [], []

    def look(status: int) -> object:
        asked.append(status)
        return object()

    promise = Promise[object](finish=look)
    threads = [threading.Thread(target=lambda: got.append(promise.future.get(SOON))) for _ in range(6)]
    for thread in threads:
        thread.start()
    native.start(promise, 3)
    native.go_on()
    for thread in threads:
        thread.join(SOON)
    assert asked == [3] and len(got) == 6 and len(set(map(id, got))) == 1
    native.said()


def test_an_exception_from_finish_is_raised(native: Native) -> None:
    def look(status: int) -> int:
        raise OSError(status, "no such stream")

    promise = Promise[int](finish=look)
    native.start(promise, 5)
    native.go_on()
    with pytest.raises(OSError, match="no such stream"):
        promise.future.get(timeout=SOON)
    native.said()


def test_finish_cannot_wait_for_its_own_result(native: Native) -> None:
    promise = Promise[int]("own", finish=lambda _status: promise.future.get())
    native.start(promise, 0)
    native.go_on()
    with pytest.raises(MeshError, match="finish= of promise 'own' asks for the promise's own result"):
        promise.future.get(timeout=SOON)
    native.said()


def test_a_status_without_finish_is_an_error(native: Native) -> None:
    promise = Promise[None]("transfer")
    native.start(promise, 11)
    native.go_on()
    with pytest.raises(MeshError, match="promise 'transfer' was finished with status 11"):
        promise.future.get(timeout=SOON)
    with pytest.raises(MeshError, match="already was finished with status 11"):
        promise.set_result(None)
    native.said()


def test_native_code_is_told_that_it_is_late(native: Native) -> None:
    kept, cancelled = Promise[int](), Promise[int]()
    for promise in (kept, cancelled):
        native.start(promise, 0)
    kept.set_result(1)
    cancelled.future.cancel()
    native.go_on(2)
    assert [native.said(), native.said()] == [1, 1]
    assert kept.future.get() == 1 and cancelled.cancelled


def test_a_handle_keeps_the_promise(native: Native) -> None:
    promise = Promise[str](finish=lambda status: f"status {status}")
    future = promise.future
    native.start(promise, 2)
    del promise
    gc.collect()
    assert not future.done()
    native.go_on()
    assert future.get(timeout=SOON) == "status 2"
    native.said()


def test_dropping_the_handle_breaks_the_promise(native: Native) -> None:
    promise = Promise[None]("transfer")
    future = promise.future
    native.start(promise, 0, finishes=False)
    del promise
    gc.collect()
    assert not future.done()
    native.go_on()
    assert isinstance(future.exception(timeout=SOON), BrokenPromise)
    native.said()


def test_one_wait_for_many_native_threads(native: Native) -> None:
    promises = [Promise[int](finish=lambda status: status) for _ in range(50)]
    for n, promise in enumerate(promises):
        native.start(promise, n)
    native.go_on(50)
    done, pending = wait([promise.future for promise in promises], timeout=SOON)
    assert len(done) == 50 and not pending
    assert gather(*[promise.future for promise in promises]).get() == list(range(50))
    for _ in promises:
        native.said()


def test_the_interpreter_ends_while_a_native_thread_holds_a_handle(
    library: Path, script: Callable[..., Script]
) -> None:
    running = script(f"""
        import threading
        from pathlib import Path
        from test_promise_native import Native
        from mesh_core import Promise
        native = Native(Path({str(library)!r}))
        promise = Promise()
        native.start(promise, 0)
        native.start(promise, 0, finishes=False)
        threading.Thread(target=promise.future.get, daemon=True).start()
        late = Promise()
        capsule = late.native_handle()
        native.library.keep(native.pointer(capsule, b"mesh_core.promise"))
        native.go_on()
        print("ends", flush=True)
    """)
    assert running.line() == "ends"
    # By C code, after the interpreter has ended.
    assert running.line() == "finished 0"
    _, errors = running.finish()
    assert running.process.returncode == 0 and not errors


def test_a_forked_copy_gets_an_error(library: Path, script: Callable[..., Script]) -> None:
    running = script(f"""
        import os
        from pathlib import Path
        from test_promise_native import Native
        from mesh_core import Promise
        native = Native(Path({str(library)!r}))
        promise = Promise()
        capsule = promise.native_handle()
        pointer = native.pointer(capsule, b"mesh_core.promise")
        pid = os.fork()
        if pid == 0:
            print(native.library.finish(pointer, 0), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print(native.library.finish(pointer, 0), promise.future.get())
    """)
    assert running.line() == "-1"
    assert running.line() == "0 None"
    running.finish()
