"""Breakpoints in actors: the stopped thread waits at a local socket for ``mesh debug``.

``hook`` is what ``breakpoint()`` calls, ``session`` one stopped thread, ``pdb`` the debugger in it, ``server`` the
thread that answers while others are stopped, ``places`` where the sockets lie, ``wire`` what is said through them,
``client`` the other end. Nothing but ``hook`` is imported before something stops.

What is stopped is found by these sockets, and not through the job's inspection socket: also on machines without the controller,
and where the controller does not answer.

* DBG-1: only the thread that has reached the breakpoint stops.
* DBG-2: a socket lies in a folder that is its owner's alone, and each end checks that the other is the same user.
* DBG-3: a socket exists only while something is stopped; what a killed process has left is removed by whoever lists.
* DBG-4: nobody being attached never lets a stopped thread go on, and never keeps one that goes on.
"""
