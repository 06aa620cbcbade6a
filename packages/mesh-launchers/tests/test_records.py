"""What is kept of jobs: AUD-1; and what their processes print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from launched import LIMIT, until
from scripts import Script

from mesh_launchers import attach_job, jobs, launch
from mesh_launchers._program import write
from mesh_launchers._records import audit, cut


def test_a_log_is_cut_when_it_is_too_long(tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    log.write_bytes(b"a" * 99 + b"b")
    with log.open("ab") as writer:
        cut(log, 100)
        assert log.stat().st_size == 100
        writer.write(b"c")
        writer.flush()
        cut(log, 100)
        assert log.read_bytes() == b"" and (tmp_path / "1.log.1").read_bytes() == b"a" * 48 + b"bc"
        # Who writes to it goes on.
        writer.write(b"d")
    assert log.read_bytes() == b"d"


def test_a_log_that_cannot_be_cut_stays_as_it_is_and_the_file_is_named(tmp_path: Path) -> None:
    log, full = tmp_path / "1.log", tmp_path / "1.log.1"
    log.write_bytes(b"a" * 100)
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{full}'"):
        cut(log, 50)
    assert log.read_bytes() == b"a" * 100
    # What had been copied does not take what little room there is.
    assert not full.is_symlink()
    cut(log, 50)
    assert (log.read_bytes(), full.read_bytes()) == (b"", b"a" * 25)


def test_a_line_says_who_and_from_where(jobs_folder: Path) -> None:
    jobs_folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", "input()", "a word"],
        stdin=subprocess.PIPE,
        env={**os.environ, "SSH_CONNECTION": "10.1.2.3 50022 10.1.2.4 22"},
    ) as process:
        until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().endswith(b"a word\0"), "it runs")
        audit("train", process.pid, os.getuid(), "stop")
        process.communicate(b"\n")
    audit("train", 2**22, 4_000_000, "stop")
    path = jobs_folder / ".audit.log"
    assert path.stat().st_mode & 0o777 == 0o600
    [line, stranger] = map(json.loads, path.read_text().splitlines())
    assert (line["job"], line["did"], line["pid"], line["from"]) == ("train", "stop", process.pid, "10.1.2.3")
    assert line["command"].endswith("input() a word") and line["user"]
    assert (stranger["user"], stranger["command"], stranger["from"]) == ("4000000", "", "this machine")


@pytest.mark.slow
@pytest.mark.usefixtures("failures")
def test_each_act_on_a_job_is_a_line(jobs_folder: Path) -> None:
    launch("local", hosts=1, name="kept", keep="60s").wait(timeout=LIMIT).detach()
    until(lambda: jobs()[0].used_by is None, "the script's end is known")
    for words in (["exec", "kept", "--", "true"], ["scale", "kept", "2"]):
        subprocess.run(
            [sys.executable, "-m", "mesh_core.cli", *words], check=True, capture_output=True, timeout=60
        )
    job = attach_job("kept")
    job.scale(1)
    job.stop()
    lines: list[Mapping[str, object]] = [
        json.loads(line) for line in (jobs_folder / ".audit.log").read_text().splitlines()
    ]
    assert [each["did"] for each in lines] == [
        "launch",
        "exec or shell",
        "scale hosts: 1 more hosts",
        "attach",
        "scale: end kept-1",
        "stop",
    ]
    assert "exec kept -- true" in str(lines[1]["command"])
    assert [each["pid"] for each in lines if each["did"] in ("launch", "attach", "stop")] == [os.getpid()] * 3


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    full = tmp_path / "host.key"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{full}'"):
        write(full, "AAAA")


@pytest.mark.slow
def test_nothing_that_is_printed_is_lost_where_a_script_detaches(tmp_path: Path) -> None:
    """KPT-3: more than any buffer on the way has room for."""
    script = Script(
        tmp_path,
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from counter import Counter
        job = launch("local", hosts=1, name="kept", keep="60s")
        counters = job.hosts.spawn_procs().spawn("counters", Counter)
        counters.say.call("\\\\n".join(["z" * 199] * 60_000)).get(timeout=60)
        job.detach()
        """,
    )
    shown = script.end()
    until(lambda: jobs()[0].used_by is None, "the script's end is known")
    # What had not come from the host by then is the next script's; nothing is lost in between.
    rest = Script(tmp_path, "attach_job('kept').stop()").end()
    assert [shown[0], shown[2], rest[0], rest[2]] == [0, "", 0, ""]
    # Counted by characters: where pieces meet, a line may be shown in two.
    assert shown[1].count("z") + rest[1].count("z") == 199 * 60_000
    assert "are missing here" not in shown[1] + rest[1]
