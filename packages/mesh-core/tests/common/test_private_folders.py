"""Folders in places that other users can write to: checked through a descriptor, never followed through a link (PRV-1)."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import descriptors_to

from mesh_core._common import private_folders
from mesh_core._common.private_folders import is_safe_parent, open_own, open_private, remove_tree
from mesh_core._features.debug import places as _places
from mesh_core._system.scratch import Scratch

STRANGER = 54321
"""A user id that nobody has here."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A place like `/tmp`; no test may leave a descriptor open there."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    yield place
    assert descriptors_to(place) == []


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder with files that must not be deleted."""
    folder = tmp_path / "precious"
    folder.mkdir(mode=0o700)
    for name in ("thesis.tex", "7.sock", ".7-ab"):
        (folder / name).write_text("years of work")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# The folder itself.


def test_a_private_folder_is_opened(shared: Path) -> None:
    (shared / "mine").mkdir(mode=0o700)
    at = open_private(str(shared / "mine"))
    try:
        assert stat.S_ISDIR(os.fstat(at).st_mode)
        assert not os.get_inheritable(at)
    finally:
        os.close(at)


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o710, 0o701])
def test_a_folder_that_others_can_enter_is_refused(shared: Path, mode: int) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(mode)
    with pytest.raises(PermissionError, match=r"mode 0700 that belongs to uid \d+; try again"):
        open_private(str(shared / "open"), remedy="try again")


def test_links_and_files_are_refused(shared: Path, precious: Path) -> None:
    (shared / "link").symlink_to(precious)
    (shared / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(PermissionError, match="is not a folder of mode 0700"):
            open_private(str(shared / name))
    with pytest.raises(FileNotFoundError):
        open_private(str(shared / "nothing"))


@needs_root
def test_another_users_folder_is_refused(shared: Path) -> None:
    (shared / "theirs").mkdir(mode=0o700)
    os.chown(shared / "theirs", STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="belongs to uid 0"):
        open_private(str(shared / "theirs"))
    with pytest.raises(PermissionError, match=f"belongs to uid {STRANGER}, who could replace"):
        open_own(str(shared / "theirs"))


@needs_root
def test_only_links_of_our_own_are_followed(shared: Path, precious: Path) -> None:
    link = shared / "link"
    link.symlink_to(precious)
    at = open_own(str(link))
    assert os.fstat(at).st_ino == precious.stat().st_ino
    os.close(at)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(PermissionError, match="is not a folder that belongs to uid 0"):
        open_own(str(link))


@needs_root
def test_a_safe_parent_is_sticky_or_not_writable_by_others(shared: Path) -> None:
    assert is_safe_parent(str(shared))
    assert not is_safe_parent(str(shared / "nothing"))
    shared.chmod(0o777)
    assert not is_safe_parent(str(shared))
    shared.chmod(0o700)
    assert is_safe_parent(str(shared))
    os.chown(shared, STRANGER, STRANGER)
    assert not is_safe_parent(str(shared))
    # Its owner can replace what others have in it.
    shared.chmod(0o1777)
    assert not is_safe_parent(str(shared))


@needs_root
@pytest.mark.parametrize("how", ["folder", "open folder", "link", "link to a link"])
def test_a_safe_parent_is_reached_through_nothing_of_others(how: str, shared: Path) -> None:
    above, link = shared / "above", shared / "link"
    own = above / "own"
    own.mkdir(parents=True, mode=0o700)
    assert is_safe_parent(str(own))
    match how:
        case "folder":
            os.chown(above, STRANGER, STRANGER)
        case "open folder":
            above.chmod(0o777)
        case _:
            link.symlink_to(own)
            assert is_safe_parent(str(link))
            os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
            own = link
            if how == "link to a link":
                own = shared / "mine"
                own.symlink_to(link)
    assert not is_safe_parent(str(own))


# The debugger's sockets.


@pytest.fixture
def runtime_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the debugger's folder is looked for first; `mesh-<uid>` does not exist yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    return shared / f"mesh-{os.geteuid()}"


def test_the_end_of_a_script_deletes_no_file_of_its_user(
    shared: Path, precious: Path, script: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user created the debugger's folder first, and put a link into it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    run = script("from mesh_core import this_host\nthis_host().sizes\nprint('up', flush=True)\ninput()")
    assert run.line() == "up"
    folder = shared / f"mesh-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, STRANGER, STRANGER)
    (folder / str(run.process.pid)).symlink_to(precious)
    run.say("end")
    run.finish()
    assert names(precious) == [".7-ab", "7.sock", "thesis.tex"]
    assert (folder / str(run.process.pid)).is_symlink()


@pytest.mark.parametrize("kind", ["link to the folder", "link to the job", "real"])
def test_forgetting_a_job_unlinks_its_sockets_only(runtime_folder: Path, precious: Path, kind: str) -> None:
    if kind == "link to the folder":
        (precious / "7").mkdir(mode=0o700)
        (precious / "7" / "7.sock").write_text("")
        runtime_folder.symlink_to(precious)
        kept = precious / "7"
    else:
        runtime_folder.mkdir(mode=0o700)
        if kind == "link to the job":
            (runtime_folder / "7").symlink_to(precious)
        else:
            precious.rename(runtime_folder / "7")
        kept = runtime_folder / "7"
    before = names(kept)
    _places.forget_job(7)
    _places.unlink(f"{runtime_folder}/7/7.sock")
    assert list(_places.find()) == []
    assert names(kept) == before


def test_sockets_of_killed_processes_are_removed_with_their_job(runtime_folder: Path) -> None:
    for _ in range(2):
        listener, path = _places.listen(7)
        listener.close()
        assert Path(path).parent == runtime_folder / "7"
        # Like a process that was killed before its socket had its name.
        os.rename(path, f"{runtime_folder}/7/.{os.getpid()}-abcd")  # noqa: PTH104
    listener, path = _places.listen(7)
    listener.close()
    assert len(names(runtime_folder / "7")) == 2
    _places.forget_job(7)
    assert not runtime_folder.exists()


def test_a_folder_that_others_can_enter_is_skipped(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "next").mkdir()
    monkeypatch.setattr(_places, "folders", lambda: [str(runtime_folder), str(tmp_path / "next" / "mesh")])
    runtime_folder.mkdir()
    runtime_folder.chmod(0o777)
    listener, path = _places.listen(7)
    listener.close()
    assert path.startswith(str(tmp_path / "next"))
    with pytest.raises(PermissionError, match="set XDG_RUNTIME_DIR to a folder of your own"):
        _places.connect(f"{runtime_folder}/7/1.sock")
    _places.unlink(path)
    assert names(tmp_path / "next") == []


@needs_root
def test_the_runtime_folder_of_the_user_before_su_is_not_used(shared: Path, runtime_folder: Path) -> None:
    assert _places.folders()[0] == str(runtime_folder)
    os.chown(shared, STRANGER, STRANGER)
    assert str(runtime_folder) not in _places.folders()


# Directories of jobs.


@pytest.fixture
def temporary(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories of jobs are created."""
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    return shared


def test_a_jobs_directory_is_private_and_removed_with_it(temporary: Path) -> None:
    scratch = Scratch()
    path = Path(scratch.path)
    assert path.parent == temporary
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "below").mkdir()
    (path / "below" / "file").write_text("x")
    scratch.close()
    assert not path.exists()
    scratch.close()


def test_a_folder_that_replaced_a_jobs_directory_is_not_removed(temporary: Path, precious: Path) -> None:
    """If others can rename entries of the folder for temporary files."""
    scratch = Scratch()
    path = Path(scratch.path)
    path.rename(temporary / "elsewhere")
    precious.rename(path)
    scratch.close()
    assert names(path) == [".7-ab", "7.sock", "thesis.tex"]
    path.rename(precious)
    path.symlink_to(precious)
    Scratch().close()
    assert names(precious) == [".7-ab", "7.sock", "thesis.tex"]


def test_only_abandoned_directories_of_this_user_are_swept(temporary: Path, precious: Path) -> None:
    for name in ("dead", "open", "live", "theirs"):
        folder = temporary / f"mesh-scratch-{name}"
        folder.mkdir(mode=0o700)
        (folder / ".alive").write_text("")
    (temporary / "mesh-scratch-open").chmod(0o755)
    (temporary / "mesh-scratch-live" / ".alive").unlink()
    (temporary / "mesh-scratch-link").symlink_to(precious)
    (precious / ".alive").write_text("")
    expected = ["mesh-scratch-link", "mesh-scratch-live", "mesh-scratch-open"]
    if os.geteuid() == 0:
        os.chown(temporary / "mesh-scratch-theirs", STRANGER, STRANGER)
        expected.append("mesh-scratch-theirs")
    Scratch().close()
    assert names(temporary) == expected
    assert "thesis.tex" in names(precious)


@needs_root
def test_another_users_folder_for_temporary_files_is_not_used(temporary: Path) -> None:
    """Like `TMPDIR` after `su`: its owner could replace the code of a workspace."""
    os.chown(temporary, STRANGER, STRANGER)
    temporary.chmod(0o777)
    scratch = Scratch()
    try:
        assert not scratch.path.startswith(str(temporary))
    finally:
        scratch.close()


def test_folders_for_keys_of_killed_processes_are_removed_and_no_others(
    shared: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PRV-1, and a process that still makes its folder."""
    monkeypatch.setattr(private_folders, "_places_of_secrets", lambda: [str(shared)])
    held, at = private_folders.make_secret_folder("mesh-host-")
    left, closed = private_folders.make_secret_folder("mesh-host-")
    os.close(closed)
    unmarked = shared / "mesh-host-new"
    unmarked.mkdir(mode=0o700)
    (precious / ".held").touch()
    (shared / "mesh-host-link").symlink_to(precious)
    open_to_all = shared / "mesh-host-open"
    open_to_all.mkdir()
    (open_to_all / ".held").touch()
    private_folders.sweep_secret_folders()
    assert not Path(left).exists()
    assert {Path(held), unmarked, open_to_all} < set(shared.iterdir())
    assert names(precious) == [".7-ab", ".held", "7.sock", "thesis.tex"]
    os.close(at)
    private_folders.sweep_secret_folders()
    assert not Path(held).exists()


def test_a_folder_is_removed_whatever_is_in_it(tmp_path: Path, precious: Path) -> None:
    """Too deep to take a step for each folder, closed to its own user, with links that lead elsewhere."""

    def fill_and_remove() -> bool:
        if os.geteuid() == 0:
            os.setuid(STRANGER)
        start = os.open(".", os.O_RDONLY)
        whole = Path("whole")
        whole.mkdir()
        os.chdir(whole)
        for each in (Path("closed/inner"), Path("closed/.inner/inner")):
            each.mkdir(parents=True)
            (each / "file").touch()
            each.chmod(0)
        Path("closed/link").symlink_to(precious)
        Path("closed").chmod(0)
        for _ in range(1200):
            Path("deep").mkdir()
            os.chdir("deep")
        os.fchdir(start)
        whole.chmod(0)
        remove_tree("whole")
        return not os.path.lexists("whole")

    tmp_path.chmod(0o777)
    before = names(precious)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(tmp_path)
            status = int(not fill_and_remove())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert names(precious) == before
