"""Breakpoints in actors: the stopped thread waits at a local socket for ``mesh debug``.

``hook`` is what ``breakpoint()`` calls, ``session`` is one stopped thread, ``pdb`` its debugger, ``server`` the thread
that answers while others are stopped, ``places`` finds the sockets, ``wire`` is their protocol, and ``client`` the other
end. Only ``hook`` is imported before a thread stops.

Stopped threads are found through these sockets instead of the job's inspection socket. That also works on machines without
the controller, and when the controller does not answer.

* DBG-1: only the thread that reached the breakpoint stops.
* DBG-2: a socket is in a folder that only its owner can enter, and each end checks that the other is the same user.
* DBG-3: a socket exists only while a thread is stopped; listing removes the sockets of killed processes.
* DBG-4: a stopped thread stays stopped, and a resumed one runs, even if nobody is attached.
"""
