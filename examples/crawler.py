"""A crawler: one actor knows which pages are left, several fetch them, and all end when no page is left.

The frontier hands out pages as they are found. Its endpoints are coroutines marked `concurrent`, so that a crawler may
wait for a page there while another brings the links it has found. The web is a small one, served by the script.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import deque
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from mesh_core import Actor, endpoint, this_host

PAGES, CRAWLERS = 200, 4


class Web(BaseHTTPRequestHandler):
    """Pages 0 to 199; every page is reached from the home page, most by several ways."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        page = int(self.path.removeprefix("/"))
        links = [2 * page + 1, 2 * page + 2, *random.Random(page).sample(range(PAGES), 3)]
        html = "".join(f'<a href="/{link}">{link}</a>' for link in links if link < PAGES)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(html.encode())

    def log_message(self, *args: object) -> None: ...


class Frontier(Actor):
    """What was found and not crawled so far."""

    def __init__(self) -> None:
        self.found = {"/0"}
        self.waiting = deque(self.found)
        self.unfinished = 1
        self.changed = asyncio.Condition()

    @endpoint(concurrent=True)
    async def take(self) -> str | None:
        """A page to crawl, as soon as there is one; None once there will be no more."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.waiting or not self.unfinished)
            return self.waiting.popleft() if self.waiting else None

    @endpoint(concurrent=True)
    async def crawled(self, links: set[str]) -> None:
        """A page is done, and led to these."""
        async with self.changed:
            new = links - self.found
            self.found |= new
            self.waiting.extend(sorted(new))
            self.unfinished += len(new) - 1
            self.changed.notify_all()


class Crawler(Actor):
    def __init__(self, frontier: Frontier, port: int) -> None:
        self.frontier = frontier
        self.web = HTTPConnection("127.0.0.1", port, timeout=30)

    @endpoint
    def crawl(self) -> list[str]:
        """Fetch pages until none is left anywhere; return which ones it was."""
        mine = []
        while page := self.frontier.take.call_one().get(timeout=30):
            self.web.request("GET", page)
            links = re.findall(r'href="([^"]+)"', self.web.getresponse().read().decode())
            self.frontier.crawled.broadcast(set(links))
            mine.append(page)
        return mine


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hosts = this_host()
    with server, hosts.spawn_procs({"procs": -(-(1 + CRAWLERS) // len(hosts))}).flatten("crawler") as seats:
        frontier = seats.slice(crawler=0).spawn("frontier", Frontier)
        others = seats.slice(crawler=slice(1, 1 + CRAWLERS))
        crawlers = others.spawn("crawlers", Crawler, frontier, server.server_port)
        for point, pages in crawlers.crawl.call().get(timeout=60):
            print(f"crawler {point['crawler']}: {len(pages)} pages")
        server.shutdown()
    print(f"together: {len(Web.asked)} requests for {len(set(Web.asked))} pages")


if __name__ == "__main__":
    main()
