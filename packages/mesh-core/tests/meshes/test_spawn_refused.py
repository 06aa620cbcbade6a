"""Spawns that are refused: the errors, and that their advice helps."""

from __future__ import annotations

import platform
import textwrap
from typing import Any

import pytest

from mesh_core import Point, this_host

pytestmark = pytest.mark.usefixtures("runtime")

# Errors in the call.


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda spawn: spawn(4), r"per_host must be named sizes such as \{'gpus': 4\}, got the number 4"),
        (lambda spawn: spawn("gpus"), r"per_host must be named sizes such as \{'gpus': 8\}, got 'gpus'"),
        (
            lambda spawn: spawn(gpus=2, nodes=1),
            r"unexpected keyword argument 'gpus'; sizes are given as a mapping: spawn_procs\(\{'gpus': 2, 'nodes': 1\}\)",
        ),
        (lambda spawn: spawn(sed="x"), "unexpected keyword argument 'sed'; did you mean 'seed'?"),
        (lambda spawn: spawn(proc_bind="0"), "proc_bind must be a list of CPUs for each process of a host"),
        (
            lambda spawn: spawn(proc_bind=[0]),
            r"proc_bind\[0\] must be a list of CPU numbers such as \[0, 1\], got 0",
        ),
        (lambda spawn: spawn(proc_bind=["0"]), r"proc_bind\[0\] must be a list of CPU numbers"),
        (
            lambda spawn: spawn(proc_bind=[["0"]]),
            r"proc_bind\[0\] must hold CPU numbers such as 0, got '0' \(str\)",
        ),
        (
            lambda spawn: spawn(preload="numpy"),
            r"preload must be a list of modules' names such as \['numpy'\]",
        ),
        (lambda spawn: spawn(preload=[platform]), "preload must hold modules' names, got <module"),
    ],
)
def test_arguments_of_another_type(call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(this_host().spawn_procs)


@pytest.mark.parametrize(
    ("binding", "text"), [([[-1]], "must hold CPU numbers from 0"), ([[]], "at least one CPU")]
)
def test_invalid_cpus(binding: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        this_host().spawn_procs(proc_bind=binding)


def test_an_environment_function_that_raises_is_the_callers_error() -> None:
    def env(point: Point) -> dict[str, str]:
        return {"A": str(1 / point.rank)}

    with pytest.raises(ZeroDivisionError):
        this_host().spawn_procs(env=env)


# Errors of the environment.


@pytest.mark.once
def test_a_deleted_working_directory(script: Any) -> None:
    run = script(
        """
        import os, tempfile
        from mesh_core import SpawnError, this_host

        if __name__ == "__main__":
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
            try:
                this_host().spawn_procs()
            except SpawnError as error:
                print(error)
        """
    )
    out, err = run.finish()
    assert out.startswith("the working directory of this process no longer exists"), err
    assert "os.chdir()" in out


@pytest.mark.once
def test_a_fork_of_the_script_spawns(script: Any) -> None:
    run = script(
        """
        import os
        from mesh_core import MeshError, this_host

        if __name__ == "__main__":
            with this_host().spawn_procs() as procs:
                procs.initialized.get()
                if os.fork() == 0:
                    try:
                        this_host().spawn_procs()
                    except MeshError as error:
                        print(error, flush=True)
                    os._exit(0)
                os.wait()
        """
    )
    out, err = run.finish()
    assert "which already uses Mesh" in out, err
    assert "Spawn after the fork instead of before it" in out


def without(call: str, errno: str) -> str:
    """Return the source of a script for which the kernel answers a system call with an error."""
    number = {"pidfd_open": 434, "memfd_create": {"x86_64": 319, "aarch64": 279}[platform.machine()]}[call]
    return textwrap.dedent(
        f"""
        import ctypes, errno, struct
        libc = ctypes.CDLL(None, use_errno=True)
        # Load the number of the call; if it is this one, answer with the error, else allow it.
        program = b"".join(
            struct.pack("HBBI", *line)
            for line in [
                (0x20, 0, 0, 0),
                (0x15, 0, 1, {number}),
                (0x06, 0, 0, 0x00050000 | errno.{errno}),
                (0x06, 0, 0, 0x7FFF0000),
            ]
        )
        lines = ctypes.create_string_buffer(program)
        filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(lines)))
        NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
        assert libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        print("filtered" if libc.prctl(SECCOMP, FILTER, filter, 0, 0) == 0 else "no filter here", flush=True)
        """
    )


@pytest.mark.once
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="the numbers of system calls differ"
)
@pytest.mark.parametrize(
    ("call", "errno", "text"),
    [
        ("pidfd_open", "ENOSYS", "pidfd_open: Function not implemented"),
        ("pidfd_open", "EPERM", "pidfd_open: Operation not permitted"),
        ("memfd_create", "ENOSYS", "memfd_create: Function not implemented"),
    ],
)
def test_a_kernel_that_lacks_what_mesh_needs(script: Any, call: str, errno: str, text: str) -> None:
    run = script(
        without(call, errno)
        + textwrap.dedent(
            """
            from mesh_core import SpawnError, this_host

            try:
                with this_host().spawn_procs({"gpus": 2}) as procs:
                    procs.initialized.get()
            except SpawnError as error:
                print(error, flush=True)
            """
        ),
        fresh=True,
    )
    if run.line() != "filtered":
        run.finish()
        pytest.skip("this system allows no filter of system calls")
    out, err = run.finish()
    assert text in out, err
    assert "use Linux 5.3 or later" in out and "seccomp profile" in out and "mesh doctor" in out
