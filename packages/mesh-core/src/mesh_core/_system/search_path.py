"""Where a new interpreter looks for modules: in the script's folders, as far as they are there and safe.

Its text is also the first thing that such an interpreter runs, before anything of Mesh can be imported. It therefore imports
only what is built in, or was imported at the interpreter's start.

PTH-2: on another host than the script's, nothing is imported from a folder that another user can write to.
"""

# pathlib takes longer to import than everything here.
# ruff: noqa: PTH109, PTH112, PTH115, PTH116, PTH118, PTH120

import os
import stat
import sys

_LINKS = 40


def why_unsafe(folder: str) -> str:
    """Return who else could put modules into a folder, or another folder in its place; empty if nobody can.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> why_unsafe(folder.name)
    ''
    >>> os.chmod(folder.name, 0o777)
    >>> why_unsafe(folder.name).startswith("everybody may write to ")
    True
    >>> folder.cleanup()
    """
    # In a user namespace, root outside of it has another number. Whoever owns the root directory is root here.
    trusted = (0, os.geteuid(), os.stat("/").st_uid)
    at, left, links = "/", os.path.join(os.getcwd(), folder).split("/"), 0
    while left:
        name = left.pop(0)
        if name == "..":
            at = os.path.dirname(at)
            continue
        here = at if name in ("", ".") else os.path.join(at, name)
        try:
            found = os.lstat(here)
        except OSError as error:
            return f"{here}: {error.strerror}"
        if found.st_uid not in trusted:
            return f"{here} belongs to another user (uid {found.st_uid})"
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _LINKS:
                return f"{here} is a link that leads nowhere"
            leads = os.readlink(here)
            left[:0] = leads.split("/")
            if leads.startswith("/"):
                at = "/"
            continue
        at = here
        # Where it is sticky, everybody can add folders, but not replace those of others.
        if found.st_mode & stat.S_IWOTH and not (left and found.st_mode & stat.S_ISVTX):
            return f"everybody may write to {here}"
    return ""


def search(wanted: list[str], *, afar: bool) -> dict[str, str]:
    """Have this interpreter look for modules where the script does; return which folders are left out on this host, and why.

    Only the script's own host has exactly its folders. On others, those that are there come before the interpreter's own.
    """
    unsafe = {}
    if afar:
        there = [each for each in wanted if os.path.isdir(each) and each not in sys.path]
        unsafe = {each: why for each in there if (why := why_unsafe(each))}
        sys.path[:] = [*(each for each in there if each not in unsafe), *sys.path]
    else:
        sys.path[:] = wanted
    return unsafe
