"""Runs a command on a machine of a `Network`, and ends as it does.

    python launch.py PID_OF_THE_MACHINE REPORT_FD FOLDER COMMAND [ARGUMENT ...]

Writes the number that the command's process has outside of the machine to the descriptor. The command dies with this
process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

import namespaces


def main() -> int:
    """Run the command; the exit status, if it was not killed."""
    machine, report, folder, *command = sys.argv[1:]
    try:
        namespaces.join(os.pidfd_open(int(machine)), namespaces.MACHINE)
    except ProcessLookupError:
        # Nothing is reported: the caller knows from that.
        return 126
    child = os.fork()
    if child == 0:
        os.close(int(report))
        return run(folder, command)
    # The pipes are the command's alone, so that whoever reads them sees when it closes them.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.write(int(report), str(child).encode())
    os.close(int(report))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        # One image of the core is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def run(folder: str, command: list[str]) -> int:
    """Become the command."""
    try:
        namespaces.die_with_parent()
        os.chdir(folder)
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} could not be run in {folder}: {error}\n")
        return 127


if __name__ == "__main__":
    sys.exit(main())
