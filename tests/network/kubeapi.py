"""The Kubernetes API with nothing but the standard library, for the tests and for their kubelet."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class Refused(Exception):
    """The API server has answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Api:
    """A user of an API server. Each request has a connection of its own, so that any thread may ask."""

    def __init__(self, address: str, token: str, authority: Path) -> None:
        self.address = address
        self._token = token
        self._context = ssl.create_default_context(cafile=str(authority))

    def _send(
        self, method: str, path: str, body: Json | None, query: Mapping[str, Any], limit: float
    ) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), context=self._context, timeout=limit)
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        where = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        connection.request(method, where, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status >= 400:
            text = response.read().decode(errors="replace")
            connection.close()
            raise Refused(response.status, text)
        return connection, response

    def text(self, method: str, path: str, body: Json | None = None, **query: Any) -> str:
        """Ask for something, and return it as it comes."""
        connection, response = self._send(method, path, body, query, 30)
        try:
            return response.read().decode(errors="replace")
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Json | None = None, **query: Any) -> Json:
        """Ask for something."""
        answer: Json = json.loads(self.text(method, path, body, **query))
        return answer

    def watch(self, path: str, **query: Any) -> Iterator[Json]:
        """Give what changes, until the server ends it."""
        asked = {**query, "watch": "true", "timeoutSeconds": 300}
        connection, response = self._send("GET", path, None, asked, 310)
        try:
            while line := response.readline():
                yield json.loads(line)
        finally:
            connection.close()
