"""Whatever clients send to a job's keeper, in whatever order, the job goes on (KPR-4)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from counter import Counter
from greeter import Greeter
from launched import LIMIT, until

from mesh_launchers import Job, JobExists, LaunchError, attach_job, jobs, launch
from mesh_launchers._door import Door
from mesh_launchers._folder import JobFolder

pytestmark = pytest.mark.slow

WORDS = (
    *("watch", "state", "visit", "hold", "offer", "fits", "start", "join", "flush", "shown", "attached"),
    *("traits", "end", "dial", "log", "stop!", "", "__class__"),
)
"""All requests but ``stop``, and some that there are not."""
FOR_OTHERS = {"stop", "hold", "visit"}
"""What is right without anything else, and would change who has the job."""
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**80,
    1e300,
    "",
    "\ud800\0",
    "x" * 100_000,
    [],
    [None],
    [[]],
    [{}],
    ["b1", -1, 2**80],
    [7] * 1000,
    {},
    {"hosts": {}},
)
KEYS = ("mesh", "targets", "hosts", "host", "lines", "address", "take_over", "procs", "limit")
LINES = (
    b"\n",
    b"null\n",
    b"[]\n",
    b'"state"\n',
    b"{\n",
    b"\xff\xfe\n",
    b"{}\n",
    b'{"do": []}\n',
    b'{"do": {"do": "state"}}\n',
    b'{"do": "state"}\n',
    b'{"number": {}, "do": "state"}\n',
    b'{"number": [[]], "do": "nothing"}\n',
    b"[" * 200_000 + b"\n",
    b'{"number": ' + b"9" * 10_000 + b', "do": "state"}\n',
    b"x" * (17 << 20) + b"\n",
)


def garbage() -> Iterator[bytes]:
    """Yield requests that make no sense, one line each."""
    yield from LINES
    for do in WORDS:
        for each in STRANGE if do not in FOR_OTHERS else ():
            # Each key alone, and all of them.
            for keys in (*([key] for key in KEYS), KEYS):
                told = dict.fromkeys(keys, each)
                yield json.dumps({"number": each, "do": do, **told}).encode() + b"\n"
            # One more host, and the end of this one, would be right.
            if do != "end":
                yield json.dumps({"do": do, "mesh": "hosts", "hosts": [0], "targets": 1}).encode() + b"\n"
            if do != "start" or each not in (None, [None]):
                yield json.dumps({"do": do, "mesh": "hosts", "hosts": each, "targets": each}).encode() + b"\n"
                yield json.dumps({"do": do, "mesh": "hosts", "targets": [each]}).encode() + b"\n"
            yield json.dumps({"do": do, "host": each, "lines": 5, "address": "x"}).encode() + b"\n"
            yield json.dumps({"do": do, "host": 0, "lines": each, "address": "x"}).encode() + b"\n"


class Client:
    """A connection that says anything, and counts the answers."""

    def __init__(self, name: str, connection: socket.socket | None = None) -> None:
        self.connection = connection or JobFolder.of(name).connect(LIMIT)
        self.connection.settimeout(LIMIT)
        self.answers = self.connection.makefile("rb")

    def ask(self, line: bytes) -> dict[str, Any]:
        """Send a line, and return the answer to it."""
        self.connection.sendall(line)
        while answer := self.answers.readline():
            told: dict[str, Any] = json.loads(answer)
            if "to" in told:
                return told
        raise AssertionError(f"the connection was ended by {line[:200]!r}")

    def close(self) -> None:
        self.answers.close()
        self.connection.close()


def say(job: Job, line: bytes) -> None:
    """Send something by the script's own connection, which takes the answers: they are to no question of its own."""
    job._door._connection.sendall(line)  # noqa: SLF001 - the end of this one is that of the job


def survives(client: Client) -> None:
    """Say everything, and see that there is an answer to each, and that all but few are errors."""
    wrong = 0
    lines = list(garbage())
    for line in lines:
        told = client.ask(line)
        assert ("is" in told) != ("error" in told), told
        assert len(told.get("why", "")) < 1000
        wrong += "error" in told
    assert wrong > len(lines) / 2
    assert client.ask(b'{"number": 5, "do": "state"}\n')["to"] == 5


def test_garbage_of_another_process() -> None:
    """KPR-4, for a client beside the script."""
    with launch("local", hosts=1, name="lab") as job:
        greeters = job.hosts.spawn_procs().spawn("greeters", Greeter)
        assert greeters.greet.call("you").get(timeout=LIMIT).values() == ["hello you"]
        client = Client("lab")
        survives(client)
        door = Door("lab", JobFolder.of("lab").connect(LIMIT))
        with pytest.raises(JobExists):
            door.ask("hold")
        door.close()
        client.close()
        # In the middle of a request, and after requests whose answers nobody reads.
        for text in (b'{"do": "st', b'{"number": 1, "do": "visit"}\n' * 1000):
            client = Client("lab")
            client.connection.sendall(text)
            client.close()
        assert greeters.greet.call("you").get(timeout=LIMIT).values() == ["hello you"]
        assert [str(each.phase) for each in job.state().hosts] == ["running"]
        assert job.scale(2).sizes == {"hosts": 2}


def test_garbage_of_the_script_itself() -> None:
    """KPR-4, for the client whose end is that of the job."""
    with launch("local", hosts=1, name="lab") as job:
        greeters = job.hosts.spawn_procs().spawn("greeters", Greeter)
        assert greeters.greet.call("you").get(timeout=LIMIT).values() == ["hello you"]
        for line in garbage():
            if b'"number": 1' not in line:
                say(job, line)
        assert greeters.greet.call("you").get(timeout=LIMIT).values() == ["hello you"]
        assert [str(each.phase) for each in job.state().hosts] == ["running"]
        with pytest.raises(LaunchError, match="has no mesh 'nix'"):
            job.scale(2, mesh="nix")
        assert job.scale(2).sizes == {"hosts": 2}


def test_garbage_at_a_kept_job() -> None:
    """KPR-4, with what only the script of a kept job may ask, and when nobody has it."""
    with launch("local", hosts=1, name="kept", keep="60s") as job:
        job.hosts.spawn_procs(name="trainers").spawn("counters", Counter).add.call(5).get(timeout=LIMIT)
        client = Client("kept")
        survives(client)
        client.close()
        for line in garbage():
            if b'"join"' not in line and b'"number": 1' not in line:
                say(job, line)
        assert job.actors["counters"].add.call(1).get(timeout=LIMIT).values() == [6]
        job.detach()
        until(lambda: jobs()[0].used_by is None, "the script's end is known")
        client = Client("kept")
        survives(client)
        client.close()
        assert jobs()[0].keep == 60.0
        with attach_job("kept") as again:
            assert again.actors["counters"].add.call(1).get(timeout=LIMIT).values() == [7]
