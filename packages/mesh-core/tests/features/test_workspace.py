"""`sync_workspace`: copies equal the tree, and only changes are sent."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_samples import Echo
from core_workspace import sync, write

from mesh_core import MeshError, WorkspaceReport, this_host

NOTES = ".mesh-workspace"


@pytest.fixture(scope="module", autouse=True)
def keeper(runtime: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start the keeper before the first test and keep it until the last."""
    this_host().sync_workspace(tmp_path_factory.mktemp("nothing")).get()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a directory to sync."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return the place of its copy, for tests that read it as files."""
    return tmp_path / "copies" / "copy"


@pytest.fixture
def worker() -> Iterator[Any]:
    """Spawn an actor in its own process that runs functions."""
    with this_host().spawn_procs(name="worker") as procs:
        yield procs.spawn("worker", Echo)


def contents(folder: Path) -> dict[str, Any]:
    """Return everything below a directory: contents and executable bits of files, targets of links."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.split("/", maxsplit=1)[0] == NOTES:
            continue
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))  # noqa: PTH115 - as bytes have it
        elif path.is_dir():
            found[name] = "directory"
        else:
            found[name] = (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found


# Copies.


def test_a_copy_equals_the_tree(tree: Path, copy: Path) -> None:
    write(tree / "top.txt", "top")
    write(tree / "empty", "")
    write(tree / "a" / "b" / "deep.bin", os.urandom(9_500_000))
    write(tree / "a" / "exactly.bin", bytes(4 << 20))
    write(tree / os.fsdecode(b"no\xff\ntext"), "odd name")
    write(tree / "run.sh", "#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "nobody" / "here").mkdir(parents=True)
    (tree / "inside").symlink_to("a/b")
    (tree / "outside").symlink_to("/etc/hostname")
    (tree / "nowhere").symlink_to("missing")
    os.mkfifo(tree / "pipe")
    report = sync(tree, to=copy)
    expected = contents_without(tree, "pipe")
    assert contents(copy) == expected
    assert report.files == 9
    assert report.hosts == 1
    assert report.sent_bytes == sum(len(each[0]) for each in expected.values() if isinstance(each[0], bytes))
    assert str(report).startswith(f"9 files of {tree} on 1 host: 6 sent")


def contents_without(folder: Path, name: str) -> dict[str, Any]:
    (folder / name).unlink()
    return contents(folder)


def test_only_changes_are_sent(tree: Path, copy: Path) -> None:
    for n in range(50):
        write(tree / f"m{n}.txt", f"{n}")
    assert len(sync(tree, to=copy).sent) == 50
    assert sync(tree, to=copy).sent == ()
    write(tree / "m7.txt", "8")
    write(tree / "new" / "n.txt", "new")
    (tree / "m9.txt").touch()
    report = sync(tree, to=copy)
    assert report.sent == ("m7.txt", "new/n.txt")
    assert report.sent_bytes == 4
    assert contents(copy) == contents(tree)


def test_changed_modes_kinds_and_links_are_copied(tree: Path, copy: Path) -> None:
    write(tree / "tool", "x")
    write(tree / "was-file", "x")
    write(tree / "was-dir" / "in" / "it", "x")
    (tree / "link").symlink_to("tool")
    sync(tree, to=copy)
    (tree / "tool").chmod(0o755)
    (tree / "was-file").unlink()
    write(tree / "was-file" / "now" / "dir", "y")
    (tree / "was-dir" / "in" / "it").unlink()
    (tree / "was-dir" / "in").rmdir()
    (tree / "was-dir").rmdir()
    write(tree / "was-dir", "now a file")
    (tree / "link").unlink()
    (tree / "link").symlink_to("was-file")
    sync(tree, to=copy)
    assert contents(copy) == contents(tree)
    (tree / "tool").chmod(0o644)
    assert sync(tree, to=copy).sent == ()
    assert contents(copy) == contents(tree)


def test_only_synced_files_are_deleted(tree: Path, copy: Path) -> None:
    """WSP-2."""
    write(tree / "old" / "a.py", "a")
    write(tree / "mixed" / "b.txt", "b")
    write(tree / "c.txt", "c")
    sync(tree, to=copy)
    write(copy / "mixed" / "theirs.txt", "not ours")
    write(copy / "c2.txt", "not ours")
    for each in ("old/a.py", "mixed/b.txt", "c.txt"):
        (tree / each).unlink()
    (tree / "old").rmdir()
    (tree / "mixed").rmdir()
    assert sync(tree, to=copy).deleted == 3 + 1
    assert list(contents(copy)) == ["c2.txt", "mixed", "mixed/theirs.txt"]


def test_existing_files_are_not_deleted(tree: Path, copy: Path) -> None:
    write(copy / "same.txt", "same")
    write(tree / "same.txt", "same")
    assert sync(tree, to=copy).sent == ()
    (tree / "same.txt").unlink()
    assert sync(tree, to=copy).deleted == 0
    assert (copy / "same.txt").read_text() == "same"


def test_a_later_job_knows_what_an_earlier_one_synced(
    tree: Path, copy: Path, script: Callable[..., Any]
) -> None:
    write(tree / "stays.txt", "1")
    write(tree / "goes.txt", "2")
    source = """
    import sys
    from mesh_core import this_host
    print(this_host().sync_workspace(sys.argv[1], to=sys.argv[2]).get())
    """
    assert "2 sent" in script(source, str(tree), str(copy)).finish()[0]
    (tree / "goes.txt").unlink()
    assert "0 sent (0 bytes), 1 deleted" in script(source, str(tree), str(copy)).finish()[0]
    assert contents(copy) == contents(tree)


@pytest.mark.parametrize(
    "notes",
    [
        "",
        "[]",
        '{"version": 1, "records": [1]}',
        '{"version": 2, "records": {"theirs.txt": [true, "f", null, ""]}}',
        '{"version": 1, "records": {"theirs.txt": [true]}}',
        '{"version": 1, "records": {"../theirs.txt": [true, "f", null, ""], "/theirs.txt": [true, "f", null, ""]}}',
    ],
)
def test_a_foreign_index_deletes_nothing(tree: Path, copy: Path, notes: str) -> None:
    write(tree / "mine.txt", "1")
    write(copy / NOTES / "index.json", notes)
    write(copy / "theirs.txt", "2")
    write(copy.parent / "theirs.txt", "2")
    report = sync(tree, to=copy)
    assert (report.sent, report.deleted) == (("mine.txt",), 0)
    assert set(contents(copy)) == {"mine.txt", "theirs.txt"}
    assert (copy.parent / "theirs.txt").exists()


def test_changes_on_the_host_are_reverted(tree: Path, copy: Path) -> None:
    write(tree / "a" / "x.txt", "right")
    write(tree / "a" / "y.txt", "right")
    sync(tree, to=copy)
    write(copy / "a" / "x.txt", "wrong")
    (copy / "a" / "y.txt").unlink()
    assert sync(tree, to=copy).sent == ("a/x.txt", "a/y.txt")
    assert contents(copy) == contents(tree)


def test_links_in_the_copy_are_not_followed(tree: Path, copy: Path, tmp_path: Path) -> None:
    """WSP-3."""
    write(tree / "a" / "x.txt", "mine")
    sync(tree, to=copy)
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere / "x.txt", "theirs")
    (copy / "a" / "x.txt").unlink()
    (copy / "a").rmdir()
    (copy / "a").symlink_to(elsewhere)
    sync(tree, to=copy)
    assert contents(copy) == contents(tree)
    (copy / "a" / "x.txt").unlink()
    (copy / "a").rmdir()
    (copy / "a").symlink_to(elsewhere)
    (tree / "a" / "x.txt").unlink()
    (tree / "a").rmdir()
    sync(tree, to=copy)
    assert contents(elsewhere) == {"x.txt": (b"theirs", False)}


def test_a_directory_with_foreign_files_is_not_replaced(tree: Path, copy: Path) -> None:
    write(tree / "name", "a file")
    write(tree / "other", "a file")
    write(copy / "name" / "theirs", "x")
    with pytest.raises(OSError, match=r"holds files which no sync put there\. Move them away"):
        sync(tree, to=copy)
    assert (copy / "name" / "theirs").exists()
    (copy / "name" / "theirs").unlink()
    sync(tree, to=copy)
    assert contents(copy) == contents(tree)


def test_excluded_files_are_not_copied(tree: Path, copy: Path) -> None:
    names = [
        ".git/HEAD", "a/__pycache__/m.pyc", "a/m.py", "a/m.pyc", ".venv/bin/python", "js/node_modules/x/y", "build/lib/z",
        "a/build/kept.py", "thing.egg-info/PKG", "data/big.ckpt", "data/big.txt", "logs/1.log", "logs/keep.log",
    ]  # fmt: skip
    for name in names:
        write(tree / name, name)

    def files() -> list[str]:
        return [name for name, what in contents(copy).items() if what != "directory"]

    sync(tree, to=copy)
    usual = ["a/build/kept.py", "a/m.py", "data/big.ckpt", "data/big.txt", "logs/1.log", "logs/keep.log"]
    assert files() == usual
    sync(tree, to=copy, exclude=["*.ckpt", "/logs/*", "!keep.log", "!/build/"])
    assert files() == ["a/build/kept.py", "a/m.py", "build/lib/z", "data/big.txt", "logs/keep.log"]


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("*.log", "a/b.log", True),
        ("a/*.log", "a/b.log", True),
        ("a/*.log", "x/a/b.log", False),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("**/z", "z", True),
        ("a?c", "abc", True),
        ("a?c", "a/c", False),
        ("[ab]x", "bx", True),
        ("[!ab]x", "bx", False),
        ("[!ab]x", "cx", True),
        ("only/", "only", False),
        ("a+b(c)", "a+b(c)", True),
    ],
)
def test_patterns(tree: Path, copy: Path, pattern: str, path: str, fits: bool) -> None:
    write(tree / path, "x")
    assert sync(tree, to=copy, exclude=[pattern]).sent == (() if fits else (path,))


@pytest.mark.full
@pytest.mark.slow
def test_a_file_that_changes_while_it_is_sent_arrives_whole(tree: Path, copy: Path) -> None:
    big = tree / "big.bin"
    with big.open("wb") as file:
        file.truncate(160 << 20)
    seen = threading.Event()

    def change() -> None:
        # The first pieces have arrived: the tree was scanned before, and the file is being read.
        while not list((copy / NOTES).glob("arriving-*/*")):
            if seen.wait(0.001):
                return
        with big.open("ab") as file:
            file.write(b"more")

    writer = threading.Thread(target=change, name="writer")
    writer.start()
    try:
        sync(tree, to=copy)
    finally:
        seen.set()
        writer.join()
    assert (copy / "big.bin").stat().st_size == (160 << 20) + 4
    assert sync(tree, to=copy).sent == ()


def test_a_file_that_keeps_changing_is_named_and_nothing_changes(tree: Path, copy: Path) -> None:
    """WSP-1."""
    write(tree / "quiet.txt", "1")
    sync(tree, to=copy)
    write(tree / "quiet.txt", "2")
    write(tree / "busy.bin", bytes(8 << 20))
    done = threading.Event()

    def keep_writing() -> None:
        with (tree / "busy.bin").open("r+b", buffering=0) as file:
            n = 0
            while not done.is_set():
                n += 1
                file.seek(0)
                file.write(n.to_bytes(8, "big"))

    writer = threading.Thread(target=keep_writing, name="writer")
    writer.start()
    try:
        with pytest.raises(
            MeshError,
            match=r"'busy.bin' in .* changed during each of 5 attempts .* exclude it. No host has changed",
        ):
            sync(tree, to=copy)
    finally:
        done.set()
        writer.join()
    assert contents(copy) == {"quiet.txt": (b"1", False)}
    sync(tree, to=copy)
    assert contents(copy) == contents(tree)


def test_concurrent_syncs_run_one_after_another(tree: Path, copy: Path) -> None:
    for n in range(30):
        write(tree / f"{n}.txt", f"{n}")
    futures = [this_host().sync_workspace(tree, to=copy) for _ in range(8)]
    sent = [len(future.get(timeout=30).sent) for future in futures]
    assert sent == [30] + [0] * 7
    assert contents(copy) == contents(tree)


def test_syncs_in_coroutines_and_unawaited_syncs(tree: Path, copy: Path) -> None:
    write(tree / "a.txt", "a")

    async def main() -> WorkspaceReport:
        this_host().sync_workspace(tree, to=copy).cancel()
        return await this_host().sync_workspace(tree, to=copy)

    assert asyncio.run(main()).files == 1
    # The abandoned one did not start, or finished before the other.
    assert contents(copy) == contents(tree)


# Mistakes.


def test_mistakes_are_reported_at_once(tree: Path, worker: Any) -> None:
    with pytest.raises(NotADirectoryError, match="is not a directory here; give the directory"):
        this_host().sync_workspace(tree / "missing")
    with pytest.raises(ValueError, match="must begin with '/' or '~'"):
        this_host().sync_workspace(tree, to="relative")
    with pytest.raises(ValueError, match="each sync would copy the last one's copy"):
        this_host().sync_workspace(tree, to=tree / "copy")
    with pytest.raises(TypeError, match=r"exclude=\['\*.log'\]"):
        this_host().sync_workspace(tree, exclude="*.log")
    with pytest.raises(ValueError, match="matches nothing"):
        this_host().sync_workspace(tree, exclude=["!/"])
    with pytest.raises(MeshError, match=r"this is worker\[0\], one of its workers; call it in the script"):
        worker.call.call_one(sync, tree).get()


def test_a_host_that_cannot_write_says_why(tree: Path, tmp_path: Path) -> None:
    write(tree / "x", "x")
    write(tmp_path / "file", "x")
    where = tmp_path / "file" / "below"
    with pytest.raises(
        NotADirectoryError, match=r"raised as NotADirectoryError by actor 'workspace'"
    ) as error:
        sync(tree, to=where)
    assert f"choose another place with to=: Not a directory: '{where}'" in str(error.value)


# Deaths.


@pytest.mark.full
@pytest.mark.slow
def test_a_keeper_that_dies_fails_the_sync_and_the_next_one_has_another(
    tree: Path, copy: Path, script: Callable[..., Any]
) -> None:
    write(tree / "x.txt", "1")
    out, err = script(
        """
        import os, signal, sys
        from pathlib import Path
        from mesh_core import SupervisionError, this_host
        from mesh_core.inspect import snapshot

        tree, copy = map(Path, sys.argv[1:])
        sync = lambda: this_host().sync_workspace(tree, to=copy)
        sync().get()
        (tree / "x.txt").write_text("2")
        with (tree / "big.bin").open("wb") as file:
            file.truncate(300 << 20)
        for _ in range(2):
            [pid] = [each.pid for each in snapshot().procs if each.mesh.startswith("workspace")]
            future = sync()
            while not list(copy.glob(".mesh-workspace/arriving-*/*")):
                pass
            os.kill(pid, signal.SIGKILL)
            try:
                future.get(timeout=30)
            except SupervisionError as error:
                print(error.failure.signal, (copy / "x.txt").read_text())
            (tree / "big.bin").unlink()
            print(sync().get(timeout=30).sent, os.listdir(copy / ".mesh-workspace"))
            (tree / "x.txt").write_text("1")
            sync().get()
            (tree / "x.txt").write_text("2")
            with (tree / "big.bin").open("wb") as file:
                file.truncate(300 << 20)
        """,
        str(tree),
        str(copy),
    ).finish()
    assert out == "9 1\n('x.txt',) ['index.json']\n" * 2, err
    # It was handled, so the script has nothing to report at its end.
    assert err == ""


def test_a_script_leaves_nothing_behind(tree: Path, script: Callable[..., Any]) -> None:
    write(tree / "made_up_end.py", "value = 1")
    started = script(
        """
        import sys
        from core_samples import Echo
        from mesh_core import this_host
        import core_workspace
        this_host().sync_workspace(sys.argv[1]).get()
        with this_host().spawn_procs() as procs:
            print(procs.spawn("echo", Echo).call.call_one(core_workspace.file_of, "made_up_end").get())
        input()
        """,
        str(tree),
    )
    file = Path(started.line())
    assert file.exists()
    assert file.parents[2].stat().st_mode & 0o777 == 0o700
    started.say("go on")
    started.finish()
    assert not file.parents[2].exists()


def test_a_script_does_not_wait_for_a_sync_that_nobody_waits_for(
    tree: Path, copy: Path, script: Callable[..., Any]
) -> None:
    with (tree / "big.bin").open("wb") as file:
        file.truncate(4 << 30)
    (tree.parent / "nothing").mkdir()
    started = script(
        """
        import sys, time
        from pathlib import Path
        from mesh_core import shutdown, this_host
        this_host().sync_workspace(Path(sys.argv[1]).parent / "nothing").get()
        future = this_host().sync_workspace(sys.argv[1], to=sys.argv[2])
        began = time.monotonic()
        shutdown()
        assert time.monotonic() - began < 8, "that is the time that an actor is given to come to its end"
        print(future.exception(timeout=1))
        """,
        str(tree),
        str(copy),
    )
    _, err = started.finish()
    assert started.process.returncode == 0, err
    assert not (copy / "big.bin").exists()


@pytest.mark.full
def test_the_next_script_cleans_up_after_a_killed_one(tree: Path, script: Callable[..., Any]) -> None:
    write(tree / "made_up_killed.py", "value = 1")
    source = """
        import sys
        from core_samples import Echo
        from mesh_core import this_host
        import core_workspace
        this_host().sync_workspace(sys.argv[1]).get()
        with this_host().spawn_procs() as procs:
            print(procs.spawn("echo", Echo).call.call_one(core_workspace.file_of, "made_up_killed").get())
        input()
    """
    first, second = script(source, str(tree)), script(source, str(tree))
    left, live = Path(first.line()), Path(second.line())
    watch = first.watch()
    first.process.kill()
    first.process.wait()
    assert watch.wait() == []
    third = script(source, str(tree))
    assert Path(third.line()).exists()
    assert not left.exists()
    assert live.exists()


def test_programs_that_do_not_sync_load_nothing(script: Callable[..., Any]) -> None:
    out, err = script(
        """
        import sys
        from core_samples import Echo
        from mesh_core import this_host
        def modules():
            return [name for name in sys.modules if "_features.workspace" in name or ".scratch" in name]
        with this_host().spawn_procs() as procs:
            print(modules() + procs.spawn("echo", Echo).call.call_one(modules).get())
        """,
        fresh=True,
    ).finish()
    assert out == "[]\n", err
