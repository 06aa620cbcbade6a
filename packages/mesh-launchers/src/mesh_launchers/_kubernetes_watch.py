"""A watch over the pods of some hosts: a thread that lists them, and follows changes, as long as it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mesh_launchers._kubernetes_api import ApiError, Cluster

Json = dict[str, Any]

_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


class PodWatch:
    """Reports pods to an event loop, by `call`, which is that loop's ``call_soon_threadsafe``.

    A watch ends for many reasons, none of which means anything for the pods: the server's time limit, a version that it has forgotten (410) or
    does not know yet (504), a broken connection. Each time all pods are listed again, and watched from there.
    """

    def __init__(
        self,
        cluster: Cluster,
        selector: str,
        call: Callable[..., object],
        *,
        listed: Callable[[list[Json]], None],
        changed: Callable[[Json], None],
        gone: Callable[[Json], None],
        trouble: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._selector = selector
        self._call = call
        self._listed, self._changed, self._gone, self._trouble = listed, changed, gone, trouble
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._cut: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {selector}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Stop reporting."""
        with self._lock:
            self._closed.set()
            if self._cut is not None:
                self._cut()

    def _run(self) -> None:
        pause = _PAUSE_S
        while not self._closed.is_set():
            try:
                self._follow()
                pause = _PAUSE_S
            except ApiError as error:
                self._tell(self._trouble, str(error))
                self._closed.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _follow(self) -> None:
        """List the pods, and report changes until the watch ends."""
        pods, query = self._cluster.path("pods"), {"labelSelector": self._selector}
        # Any version will do, since the watch continues from it; the newest one is not always known to the server that is asked to watch.
        listing = self._cluster.request("GET", pods, query={**query, "resourceVersion": "0"})
        self._tell(self._listed, listing["items"])
        self._tell(self._trouble, "")
        since = listing["metadata"]["resourceVersion"]
        asked = {**query, "resourceVersion": since}
        for event in self._cluster.watch(pods, asked, self._opened):
            if self._closed.is_set():
                return
            self._tell(self._gone if event["type"] == "DELETED" else self._changed, event["object"])

    def _opened(self, cut: Callable[[], None]) -> None:
        with self._lock:
            self._cut = cut
            if self._closed.is_set():
                cut()

    def _tell(self, to: Callable[..., None], what: object) -> None:
        try:
            if not self._closed.is_set():
                self._call(to, what)
        except RuntimeError:
            # The loop has ended.
            self._closed.set()
