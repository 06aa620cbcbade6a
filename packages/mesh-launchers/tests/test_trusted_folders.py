"""Folders that other users have made, or can change, are not used: those of jobs, keys and targets (FLD-2, PRV-1)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launched import LIMIT
from test_launcher_commands import mesh

from mesh_launchers import JobNotFound, LaunchError, _authority, attach_job, jobs, launch
from mesh_launchers._folder import JobFolder
from mesh_launchers._records import audit

STRANGER = 54321
"""A user id that nobody has here."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def shared(jobs_folder: Path) -> Path:
    """A folder of jobs that is like `/tmp`."""
    jobs_folder.mkdir()
    jobs_folder.chmod(0o1777)
    return jobs_folder


@contextmanager
def as_stranger() -> Iterator[None]:
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_link_in_place_of_a_job_is_not_followed(shared: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "folder").mkdir(parents=True, mode=0o700)
    (precious / "thesis.tex").write_text("years of work")
    (shared / "train").symlink_to(precious)
    with pytest.raises(
        LaunchError, match=r"another user could have made it .*set MESH_JOBS to a folder of your own"
    ):
        launch("local", hosts=1, name="train")
    with pytest.raises(LaunchError, match="another user could have made it"):
        attach_job("train")
    assert jobs() == []
    assert sorted(each.name for each in precious.iterdir()) == ["folder", "thesis.tex"]
    (shared / "train").unlink()


def test_folders_that_are_no_jobs_are_left_alone(shared: Path) -> None:
    """FLD-3: `MESH_JOBS` may be a folder with others of this user, which are private as well."""
    for name in ("train", "empty"):
        (shared / name).mkdir(mode=0o700)
    (shared / "train" / "thesis.tex").write_text("years of work")
    assert jobs() == []
    with pytest.raises(
        LaunchError,
        match=r"train is there already, and is no job's folder \(1 entries, such as 'thesis.tex'\)",
    ):
        launch("local", hosts=1, name="train")
    with pytest.raises(JobNotFound):
        attach_job("train")
    assert [each.name for each in (shared / "train").iterdir()] == ["thesis.tex"]
    kept = shared / ".keys" / "cloud"
    kept.mkdir(parents=True, mode=0o700)
    (shared / ".keys").chmod(0o700)
    _authority.sweep()
    kept.rmdir()
    folder, lock = JobFolder.make("empty")
    assert not JobFolder.of("train").runs() and folder.runs()
    os.close(lock)
    # A killed keeper's is removed.
    assert jobs() == [] and not (shared / "empty").exists()
    shutil.rmtree(shared / "train")


@pytest.mark.parametrize("how", ["link", "pipe", "hard link", "open to others", "folder"])
def test_audit_lines_are_written_to_no_file_that_others_have_put_there(
    how: str, shared: Path, tmp_path: Path
) -> None:
    """FLD-2: in a folder of jobs that is like `/tmp`; and nobody waits for a reader."""
    precious, path = tmp_path / "precious", shared / ".audit.log"
    precious.write_text("years of work")
    precious.chmod(0o600)
    match how:
        case "link":
            path.symlink_to(precious)
        case "pipe":
            os.mkfifo(path, 0o600)
        case "hard link":
            path.hardlink_to(precious)
        case "open to others":
            path.touch(0o666)
            path.chmod(0o666)
        case "folder":
            path.mkdir()
    with pytest.raises(PermissionError, match=r".audit.log is not a file of mode 0600 that belongs to uid"):
        audit("train", os.getpid(), os.getuid(), "stop")
    assert precious.read_text() == "years of work"
    path.rmdir() if how == "folder" else path.unlink()
    audit("train", os.getpid(), os.getuid(), "stop")
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()


@needs_root
def test_another_users_job_is_not_attached_or_listed(shared: Path) -> None:
    theirs = shared / "train"
    theirs.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(theirs / "door"))
        door.listen()
        os.chown(theirs, STRANGER, STRANGER)
        with pytest.raises(LaunchError, match="train is not used"):
            attach_job("train")
        assert jobs() == []
    shutil.rmtree(theirs)


@needs_root
@pytest.mark.parametrize("how", ["theirs", "open"])
def test_a_folder_of_jobs_that_others_can_change_is_refused(shared: Path, how: str) -> None:
    if how == "theirs":
        os.chown(shared, STRANGER, STRANGER)
    else:
        shared.chmod(0o777)
    for use in (lambda: launch("local", hosts=1, name="train"), lambda: attach_job("train"), jobs):
        with pytest.raises(LaunchError, match="belongs to uid 54321" if how == "theirs" else "chmod go-w"):
            use()


@needs_root
def test_another_users_process_is_not_taken_for_a_keeper(jobs_folder: Path) -> None:
    folder, lock = JobFolder.make("train")
    try:
        with folder.listen() as door:
            with as_stranger():
                door.listen()  # the kernel remembers who calls this last
            with pytest.raises(LaunchError, match="belongs to uid 54321"):
                folder.connect(LIMIT)
        with pytest.raises(JobNotFound):
            folder.connect(LIMIT)
    finally:
        folder.remove()
        os.close(lock)
    assert not (jobs_folder / "train").exists()


@pytest.mark.slow
def test_a_process_in_another_namespace_is_not_served(jobs_folder: Path) -> None:
    """PER-1: a sandbox's processes have the user's id, but must not end hosts or run code on them."""
    unshare = shutil.which("unshare")
    apart = [str(unshare), "--user", "--map-current-user", "--pid", "--fork"]
    if unshare is None or subprocess.run([*apart, "true"], check=False, timeout=60).returncode != 0:
        pytest.skip("needs user namespaces, and the program unshare")
    ask = (
        "import socket, sys\n"
        "door = socket.socket(socket.AF_UNIX)\n"
        "door.connect(sys.argv[1])\n"
        'try: door.sendall(b\'{"number": 1, "do": "state"}\\n\'); print(door.recv(7))\n'
        "except ConnectionError: print(b'')\n"
    )
    with launch("local", hosts=1, name="train") as job:
        job.wait(timeout=LIMIT)
        for words, heard in ((apart, "b''"), ([], "b'{\"to\": '")):
            command = [*words, sys.executable, "-c", ask, str(jobs_folder / "train" / "door")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            assert done.stdout.strip() == heard
        assert "namespace, such as a sandbox's" in (jobs_folder / "train" / "keeper.log").read_text()


@needs_root
@pytest.mark.slow
def test_keys_are_not_put_into_another_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = tmp_path / "run"
    theirs.mkdir()
    theirs.chmod(0o777)
    os.chown(theirs, STRANGER, STRANGER)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(theirs))
    with launch("local", hosts=1) as job:
        job.wait(timeout=LIMIT)
        assert list(theirs.iterdir()) == []


@needs_root
@pytest.mark.slow
def test_targets_of_another_user_are_refused(tmp_path: Path) -> None:
    """They say which program is the interpreter."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('ran')")
    targets = tmp_path / "mesh.toml"
    targets.write_text('[targets.lab]\nlauncher = "local"\nhosts = 1\n')
    os.chown(targets, STRANGER, STRANGER)
    refused = mesh("run", "--dry-run", "--target", "lab", "train.py", at=project)
    assert refused.returncode == 1
    assert f"{targets} belongs to uid {STRANGER}, not to uid 0 or root" in refused.stderr
    os.chown(targets, 0, 0)
    assert mesh("run", "--dry-run", "--target", "lab", "train.py", at=project).returncode == 0
