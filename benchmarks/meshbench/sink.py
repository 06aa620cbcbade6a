"""A plain TCP server that has nothing to do with anything: `python -m meshbench.sink PORT`.

It reads once from each connection and closes it; who says nothing is left in peace. So a thrower of garbage has as much
to do with it as with a gateway that refuses, and the machine hardly anything.
"""

from __future__ import annotations

import selectors
import socket
import sys
from contextlib import suppress

from meshbench.network import LOOPBACK

_ENOUGH = 1 << 16


def main() -> None:
    """Serve until it is ended.

    Example:
        python -m meshbench.sink 7171
    """
    selector = selectors.DefaultSelector()
    server = socket.create_server((LOOPBACK, int(sys.argv[1])), backlog=1024)
    selector.register(server, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            ready = key.fileobj
            assert isinstance(ready, socket.socket)  # nothing else is registered
            if ready is server:
                link, _ = server.accept()
                link.setblocking(False)
                selector.register(link, selectors.EVENT_READ)
            else:
                with suppress(OSError):
                    ready.recv(_ENOUGH)
                selector.unregister(ready)
                ready.close()


if __name__ == "__main__":
    main()
