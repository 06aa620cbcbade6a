"""Trees of processes under an actor, ended in eight ways: how many are left after a second, and how long the last one took.

    python benchmarks/trees.py --rounds 125 --json trees.json

Each round starts a script with an actor, which starts a tree: a child, one that ignores SIGTERM, one in a session of its own,
one that is stopped, and a daemon without a parent and without an environment. All have a fifo open, whose end is the end of the last of
them. Then the actor's process, its fork server, the script or the agent of the host is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AFTER_S = 1.0
MEMBERS = 5

TREE = """
import os, signal, sys
fifo = os.open(sys.argv[1], os.O_WRONLY)
def stay():
    os.write(fifo, b".")
    while True:
        signal.pause()
if os.fork() == 0:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stay()
if os.fork() == 0:
    os.setsid()
    stay()
if os.fork() == 0:
    os.write(fifo, b".")
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
if (child := os.fork()) == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        stay()
    os._exit(0)
os.waitpid(child, 0)
stay()
"""

SCRIPT = """
import os, signal, subprocess, sys
from mesh_core import Actor, Credentials, HostAgent, attach_to_workers, endpoint, set_fault_handler, this_host

class Planter(Actor):
    @endpoint
    def plant(self, *argv: str) -> tuple[int, int]:
        subprocess.Popen(argv)
        return os.getpid(), os.getppid()

    @endpoint
    def end(self, how: str) -> None:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGSEGV)

def main(how, tree, fifo, folder):
    set_fault_handler(lambda failure: None)
    agent = None
    hosts = this_host()
    if how == "agent":
        job = Credentials.new(folder + "/job")
        job.issue_host(folder + "/host")
        agent = HostAgent(folder + "/host").start()
        hosts = attach_to_workers([agent.address], credentials=job)
    procs = hosts.spawn_procs()
    planter = procs.spawn("planter", Planter)
    worker, fork_server = planter.plant.call_one(sys.executable, "-S", "-c", tree, fifo).get()
    print(worker, fork_server, agent.pid if agent else 0, flush=True)
    sys.stdin.readline()
    if how == "stop":
        procs.stop().get()
    elif how in ("exit", "segv"):
        planter.end.broadcast(how)
    print("done", flush=True)
    sys.stdin.readline()
    # What is left of a host whose agent was killed is nobody's to stop.
    os._exit(0)

main(*sys.argv[1:])
"""

WAYS = ("stop", "exit", "segv", "worker", "fork_server", "script", "term", "agent")


def left(fifo: str) -> int:
    """How many processes have it open, besides this one."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            found += int(folder.parent.name) != os.getpid() and any(
                os.readlink(fd) == fifo for fd in folder.iterdir()
            )
        except OSError:
            continue
    return found


def one(way: str) -> tuple[int, float]:
    """End a tree in one way. Returns how many processes are left, and how long the last one took."""
    with tempfile.TemporaryDirectory(prefix="mesh-trees-") as folder:
        fifo = f"{folder}/fifo"
        os.mkfifo(fifo)
        read = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        script = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, way, TREE, fifo, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert script.stdin is not None
        assert script.stdout is not None
        poll = select.poll()
        poll.register(read, select.POLLIN)
        try:
            worker, fork_server, agent = map(int, script.stdout.readline().split())
            there = 0
            while there < MEMBERS:
                if not poll.poll(60_000):
                    raise RuntimeError(f"{way}: {there} of {MEMBERS} processes have started")
                there += len(os.read(read, 64))
            victims = {"worker": worker, "fork_server": fork_server, "script": script.pid, "agent": agent}
            if way == "term":
                os.kill(script.pid, signal.SIGTERM)
            elif way in victims:
                os.kill(victims[way], signal.SIGKILL)
            else:
                script.stdin.write("\n")
                script.stdin.flush()
                if way == "stop":
                    script.stdout.readline()
            began = time.monotonic()
            until = began + AFTER_S
            while (pause := until - time.monotonic()) > 0 and poll.poll(pause * 1000):
                if not os.read(read, 64):
                    return 0, time.monotonic() - began
            return left(fifo), AFTER_S
        finally:
            script.kill()
            script.communicate()
            os.close(read)


def main() -> None:
    """Run the rounds, and print one line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=125, help="of each way (125: 1,000 trees)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for way in WAYS:
        results = [one(way) for _ in range(args.rounds)]
        times = sorted(took for _, took in results)
        figures[way] = {
            "trees": len(results),
            "processes left": sum(each for each, _ in results),
            "median ms": round(statistics.median(times) * 1000, 1),
            "longest ms": round(times[-1] * 1000, 1),
        }
        print(way.ljust(8), figures[way], flush=True)
    if args.json:
        machine = {"kernel": platform.release(), "cores": os.cpu_count(), "load": os.getloadavg()}
        args.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=1) + "\n")
    sys.exit(any(each["processes left"] for each in figures.values()))


if __name__ == "__main__":
    main()
