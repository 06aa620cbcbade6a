"""Throwaway processes for code that may crash, hang or be hostile: :class:`Sandboxes`.

::

    owner ── guard ── template ── keeper of a box ── worker: functions and tools run here, and what they start
             (exec)   (fork)      (fork; pid 1)      (fork)

``sandboxes`` and ``sandbox`` are what users see, ``stock`` is the thread that talks to the template. ``template`` is guard and
template, ``box`` is keeper and worker, ``isolation`` what the kernel is asked for, ``plain`` and ``outcome`` what comes
back.

The template is started by exec once per kind, rather than forked from a fork server or the owner: a box is a copy of it, and must not
hold what these have in memory, such as credentials.

BOX-1: nothing that comes out of a box is unpickled, imported or run by its owner.
BOX-2: a box is taken once. What has been used is ended, never handed out again.
BOX-3: when the last of owner, guard and template ends, nothing of the boxes is left; any one of them may be killed.
"""
