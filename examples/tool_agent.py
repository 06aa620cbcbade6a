"""Agents that solve tasks by writing Python: each snippet runs in a sandbox, and what goes wrong is told to the model.

The model is scripted: it answers as a language model would, and its first attempts fail in the usual ways. Several agents
work at once, behind a pool; their sandboxes have no network where that can be had, and little memory and time.
"""

from __future__ import annotations

import contextlib
import io

from mesh_core import Actor, Pool, SandboxDied, SandboxError, Sandboxes, SandboxTimeout, endpoint, this_host

AGENTS, TIME, ATTEMPTS = 2, 2.0, 3

SCRIPT = {
    "the sum of the squares below 10": ["print(sum(n * n for n in range(10)))"],
    "the longest word": [
        "print(max([], key=len))",
        "print(max('what a wonderful day'.split(), key=len))",
    ],
    "the answer to everything": [
        "while True: pass",
        "print(42)",
    ],
    "how many primes there are below 1000": [
        "sieve = [True] * 10**9",
        "print(sum(all(n % d for d in range(2, n)) for n in range(2, 1000)))",
    ],
    "six by seven": [
        "import os; os.abort()",
        "print(6 * 7)",
    ],
}


class Model:
    """Answers a task with a snippet, and a complaint with a better one."""

    def write(self, task: str, complaints: list[str]) -> str:
        return SCRIPT[task][len(complaints)]


def run(code: str) -> str:
    """What a snippet prints; this runs in a sandbox."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    return out.getvalue().strip()


class Agent(Actor):
    """Asks a model, and runs what that has written."""

    def __init__(self) -> None:
        self.model = Model()
        self.boxes = Sandboxes(memory=256 << 20, pids=16, network=None, ready=2, name="python")

    @endpoint
    async def solve(self, task: str) -> tuple[str, list[str]]:
        complaints: list[str] = []
        while len(complaints) < ATTEMPTS:
            code = self.model.write(task, complaints)
            async with self.boxes.take_async(timeout=30) as box:
                try:
                    return await box.call_async(run, code, timeout=TIME), complaints
                except SandboxTimeout:
                    complaints.append(f"it took more than {TIME:g} s")
                except SandboxDied as died:
                    complaints.append(f"it crashed with status {died.exitcode}")
                except SandboxError:
                    raise  # no sandbox can be had: not the model's fault
                except Exception as error:  # noqa: BLE001 - whatever the snippet has raised
                    complaints.append(f"{type(error).__name__}: {error}")
        return "no answer", complaints


def main() -> None:
    hosts = this_host()
    with hosts.spawn_procs({"agents": AGENTS}) as procs:
        agents = procs.spawn("agents", Agent)
        with Pool(agents, per_rank=2) as pool:
            for task, (answer, complaints) in zip(SCRIPT, pool.map(agents.solve, SCRIPT), strict=True):
                attempts = f"{len(complaints) + 1} attempt{'s' if complaints else ''}"
                print(": ".join([task, f"{answer}, after {attempts}", *complaints]))


if __name__ == "__main__":
    main()
