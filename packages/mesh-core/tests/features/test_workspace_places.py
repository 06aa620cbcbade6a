"""Where copies of workspaces are put: modes, full disks, and folders that other users can write to."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_processes import descriptors_to
from core_workspace import write

from mesh_core import MeshError
from mesh_core._features.workspace.manifest import Manifest, Scanner
from mesh_core._features.workspace.mirror import DONE, MORE, Mirror
from mesh_core._features.workspace.rules import Rules

STRANGER = 54321
NOTES = ".mesh-workspace"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a directory to sync."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return the place of its copy."""
    return tmp_path / "copy"


def scan(tree: Path) -> Manifest:
    """Return the tree as a host receives it."""
    return Manifest.decode(Scanner(str(tree), Rules([]), lambda: None).scan().encode())


def transfer(tree: Path, mirror: Mirror) -> int:
    """Run one sync without hosts and connections, and return how many files were sent."""
    manifest = scan(tree)
    lacking = memoryview(mirror.survey(manifest)).cast("I").tolist()
    for number in lacking:
        mirror.take([(number, (tree / manifest.entries[number].path).read_bytes(), DONE)])
    mirror.commit()
    return len(lacking)


def modes(folder: Path) -> dict[str, int]:
    return {
        str(each.relative_to(folder)): stat.S_IMODE(each.stat().st_mode)
        for each in sorted(folder.rglob("*"))
        if NOTES not in each.parts
    }


# Modes.


@pytest.mark.parametrize("umask", [0o022, 0o077, 0])
def test_files_and_folders_keep_their_modes(tree: Path, copy: Path, umask: int) -> None:
    wanted = {"secret": 0o600, "shared": 0o664, "program": 0o755, "own-program": 0o700, "fixed": 0o444}
    for name, mode in wanted.items():
        write(tree / name, name)
        (tree / name).chmod(mode)
    (tree / "closed").mkdir()
    (tree / "closed").chmod(0o700)
    before = os.umask(umask)
    try:
        mirror = Mirror(copy)
        assert transfer(tree, mirror) == len(wanted)
    finally:
        os.umask(before)
    assert modes(copy) == modes(tree) == {**wanted, "closed": 0o700}
    for name in wanted:
        (tree / name).chmod(0o640)
    (tree / "closed").chmod(0o750)
    assert transfer(tree, mirror) == 0, "contents have not changed"
    assert modes(copy) == modes(tree) == {**dict.fromkeys(wanted, 0o640), "closed": 0o750}


def test_copies_are_neither_setuid_nor_world_writable(tree: Path, copy: Path) -> None:
    write(tree / "program", "x")
    (tree / "program").chmod(0o6777)
    (tree / "open").mkdir()
    (tree / "open").chmod(0o1777)
    (tree / "odd").mkdir()
    (tree / "odd").chmod(0o505)
    transfer(tree, Mirror(copy))
    assert modes(copy) == {"odd": 0o705, "open": 0o775, "program": 0o775}


def test_a_folder_keeps_its_setgid_bit(tree: Path, copy: Path) -> None:
    (tree / "team").mkdir()
    (tree / "team").chmod(0o750)
    transfer(tree, Mirror(copy))
    (copy / "team").chmod(0o2750)
    (tree / "team").chmod(0o770)
    transfer(tree, Mirror(copy))
    assert modes(copy) == {"team": 0o2770}


# Failures (WSP-4).


def test_a_sync_that_fails_on_a_full_disk_leaves_nothing(
    tree: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        write(tree / name, name * 1000)
    mirror = Mirror(copy)
    manifest = scan(tree)
    mirror.survey(manifest)
    mirror.take([(0, b"a" * 1000, DONE), (1, b"b" * 100, MORE)])
    assert descriptors_to(copy)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(
            OSError, match=r"No space left on device: the sync needs 3,000 bytes here, and"
        ) as error:
            mirror.take([(1, b"b" * 900, DONE)])
    assert error.value.errno == errno.ENOSPC
    assert "choose another place with to=" in str(error.value)
    assert os.listdir(copy / NOTES) == []  # noqa: PTH208
    assert descriptors_to(copy) == []
    # What is still under way does not count for it, and is not taken for a complete sync.
    mirror.take([(2, b"c" * 1000, DONE)])
    with pytest.raises(MeshError, match=r"abandoned\. Sync again"):
        mirror.commit()
    assert transfer(tree, mirror) == 3
    assert (copy / "b").read_text() == "b" * 1000
    assert descriptors_to(copy) == []


@pytest.mark.slow
@pytest.mark.once
@needs_root
def test_a_full_disk_is_named_to_the_script(tree: Path, copy: Path, script: Callable[..., Any]) -> None:
    write(tree / "big", b"x" * (3 << 20))
    write(tree / "more", b"y" * (3 << 20))
    copy.mkdir()
    run = script(
        """
        import ctypes, os, sys
        libc = ctypes.CDLL(None, use_errno=True)
        # A mount that nobody else sees.
        if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
            sys.exit("cannot mount here")
        tree, copy = sys.argv[1:]
        assert libc.mount(b"none", copy.encode(), b"tmpfs", 0, b"size=2m") == 0
        from mesh_core import this_host
        error = this_host().sync_workspace(tree, to=copy).exception(timeout=30)
        print(error)
        print(sorted(os.listdir(copy)), os.listdir(f"{copy}/.mesh-workspace"), os.statvfs(copy).f_bfree * 4096 > 1.9 * 2**20)
        """,
        str(tree),
        str(copy),
        fresh=True,
    )
    out, err = run.finish()
    if "cannot mount here" in err:
        pytest.skip("mounts cannot be made here")
    assert f"the sync needs 6,291,456 bytes here, and the file system at {copy} has 2," in out, out + err
    assert out.endswith("['.mesh-workspace'] [] True\n")


# Folders of other users (PRV-1).


@needs_root
@pytest.mark.parametrize("what", ["the copy", "its notes", "a folder in it", "a link to it"])
def test_another_users_folder_is_refused(tree: Path, copy: Path, what: str) -> None:
    """The folder's owner could replace what is synced with other code, which processes would import."""
    write(tree / "package" / "code.py", "x")
    theirs = {"the copy": copy, "its notes": copy / NOTES, "a folder in it": copy / "package"}.get(what)
    if theirs is None:
        (copy.parent / "elsewhere").mkdir()
        copy.symlink_to(copy.parent / "elsewhere")
        os.chown(copy, STRANGER, STRANGER, follow_symlinks=False)
    else:
        theirs.mkdir(parents=True)
        os.chown(theirs, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=r"belongs? to uid") as error:
        transfer(tree, Mirror(copy))
    assert str(copy) in str(error.value) or NOTES in str(error.value)
    assert descriptors_to(copy.parent) == []
    assert not (copy / "package" / "code.py").exists()


@needs_root
def test_another_users_files_are_replaced_even_if_they_are_equal(tree: Path, copy: Path) -> None:
    write(tree / "code.py", "x")
    write(copy / "code.py", "x")
    os.chown(copy / "code.py", STRANGER, STRANGER)
    assert transfer(tree, Mirror(copy)) == 1
    assert (copy / "code.py").stat().st_uid == os.geteuid()


def test_an_index_that_is_a_link_is_refused(tree: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    copy.mkdir()
    (copy / NOTES).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a folder that belongs"):
        transfer(tree, Mirror(copy))


def test_the_users_own_link_to_the_copy_is_followed(tree: Path, copy: Path, tmp_path: Path) -> None:
    write(tree / "x", "x")
    (tmp_path / "elsewhere").mkdir()
    copy.symlink_to(tmp_path / "elsewhere")
    transfer(tree, Mirror(copy))
    assert (tmp_path / "elsewhere" / "x").read_text() == "x"


def test_links_that_appear_during_a_sync_are_not_followed(tree: Path, copy: Path, tmp_path: Path) -> None:
    """WSP-3, also between checking a folder and using it."""
    write(tree / "a" / "x", "mine")
    write(tree / "gone" / "x", "mine")
    mirror = Mirror(copy)
    transfer(tree, mirror)
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere / "x", "theirs")
    write(tree / "a" / "x", "changed")
    (tree / "gone" / "x").unlink()
    (tree / "gone").rmdir()
    manifest = scan(tree)
    (number,) = memoryview(mirror.survey(manifest)).cast("I").tolist()
    mirror.take([(number, b"changed", DONE)])
    for name in ("a", "gone"):
        (copy / name).rename(tmp_path / f"{name}-moved")
        (copy / name).symlink_to(elsewhere)
    with pytest.raises(OSError, match="a"):
        mirror.commit()
    assert (elsewhere / "x").read_text() == "theirs"
    assert descriptors_to(tmp_path) == []
