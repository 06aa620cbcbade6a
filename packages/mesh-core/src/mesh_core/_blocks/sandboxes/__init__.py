"""Disposable processes for code that may crash, hang or be hostile: :class:`Sandboxes`.

::

    owner ── guard ── template ── keeper of a box ── worker: functions and tools run here, and what they start
             (exec)   (fork)      (fork; pid 1)      (fork)

``sandboxes`` and ``sandbox`` are the public part; ``stock`` is the thread that talks to the template. ``template`` has guard and
template, ``box`` has keeper and worker. ``isolation`` asks the kernel for namespaces; ``plain`` and ``outcome`` are about results.

The template is started by exec, once per kind, rather than forked from a fork server or the owner: a box is a copy of the template,
and must not contain what those have in memory, such as credentials.

BOX-1: the owner of a box never unpickles, imports or runs anything that comes out of it.
BOX-2: a box is used once. A used box is ended, and never handed out again.
BOX-3: when the last of owner, guard and template ends, nothing of the boxes is left; any one of them may be killed.
"""
