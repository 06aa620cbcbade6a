"""The Kubernetes API, as the launcher uses it: JSON requests and streams, from threads.

Configuration and authentication are the official client's (`kubernetes`), except for a simple kubeconfig (`_kubeconfig.py`). Objects stay JSON here, as received or as they
will be sent: the client's own classes know the fields of one version, and drop others that a user's pod template has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from mesh_launchers._errors import LaunchError
from mesh_launchers._kubeconfig import plain_access

_T = TypeVar("_T")
_CONNECT_S = 10.0
_ANSWER_S = 15.0
_AT_ONCE = 8
"""The most requests at once."""
_CONNECTIONS = 4 * _AT_ONCE
"""Each watch and each request has a connection of its own."""
_WATCH_S = 240
"""The server ends a watch after this time, and another one begins: a connection that was lost silently is noticed by then."""
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PATCH = "application/merge-patch+json"

Json = dict[str, Any]


class ApiError(Exception):
    """The API server has refused something, or was not reached."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "", was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        """Whether the server may have received the request."""
        self.status = status
        """The status of HTTP; 0 if there was no answer."""
        self.reason = reason
        """The server's reason, such as ``AlreadyExists``."""

    @property
    def is_final(self) -> bool:
        """Whether the same request would be refused again."""
        return 400 <= self.status < 500 and self.status not in {408, 409, 410, 425, 429}


class Cluster:
    """A namespace of a cluster, with the user's rights there."""

    def __init__(
        self, server: str, namespace: str, pool: Any, authorization: Callable[[], dict[str, str]]
    ) -> None:
        self._server = server.rstrip("/")
        self._pool = pool
        self._sign = authorization
        self._signing = threading.Lock()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kubernetes")
        self.namespace = namespace

    @classmethod
    def of(cls, kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
        """Find a cluster: that of a kubeconfig, or else the one in which this process runs."""
        if (access := plain_access(kubeconfig, context)) is not None:
            signed = {} if access.token is None else {"authorization": f"Bearer {access.token}"}
            pool = access.pool(_CONNECTIONS)
            return cls(access.server, namespace or access.namespace or "default", pool, lambda: signed)
        return cls._of_official(kubeconfig, context, namespace)

    @classmethod
    def _of_official(cls, kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
        """Let the official client find it."""
        from kubernetes import config
        from kubernetes.client import Configuration
        from kubernetes.client.rest import RESTClientObject

        configuration = Configuration()
        try:
            named = kubeconfig or context or os.environ.get("KUBECONFIG")
            if named or (Path.home() / ".kube" / "config").exists():
                file = None if kubeconfig is None else str(Path(kubeconfig).expanduser())
                if file is not None and not Path(file).exists():
                    raise LaunchError(f"there is no kubeconfig {file}")
                config.load_kube_config(file, context, configuration, persist_config=False)
                found = _namespace_of(file, context)
            elif (_SERVICE_ACCOUNT / "token").exists():
                config.load_incluster_config(configuration)
                found = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
            else:
                raise LaunchError(
                    "no cluster is configured here: there is no ~/.kube/config, no KUBECONFIG, and this process does not run in a pod with a "
                    "service account. Name a file with kubeconfig="
                )
        except (config.ConfigException, OSError) as error:
            raise LaunchError(f"the cluster's configuration cannot be used: {error}") from error
        configuration.connection_pool_maxsize = _CONNECTIONS
        pool = RESTClientObject(configuration).pool_manager

        def authorization() -> dict[str, str]:
            settings = configuration.auth_settings().values()
            return {
                each["key"]: each["value"] for each in settings if each["in"] == "header" and each["value"]
            }

        return cls(configuration.host, namespace or found or "default", pool, authorization)

    def path(self, kind: str, name: str = "", below: str = "") -> str:
        """Return the path of objects of a kind in this namespace."""
        group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        return "/".join(each for each in (f"{group}/namespaces/{self.namespace}/{kind}", name, below) if each)

    # From any thread.

    def request(
        self, method: str, path: str, body: Json | None = None, query: Mapping[str, Any] | None = None
    ) -> Json:
        """Send a request, and return the answer."""
        data = self._read(method, path, body, query)
        try:
            answer: Json = json.loads(data)
        except ValueError as error:
            raise ApiError(f"what has answered at {self._server} is no API server: {data[:200]!r}") from error
        return answer

    def _read(self, method: str, path: str, body: Json | None, query: Mapping[str, Any] | None) -> bytes:
        import urllib3

        response = self._send(method, path, body, query, _ANSWER_S)
        try:
            data: bytes = response.read(decode_content=True)
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(f"the API server's answer broke off: {error}") from error
        finally:
            response.release_conn()
        return data

    def _send(
        self,
        method: str,
        path: str,
        body: Json | None,
        query: Mapping[str, Any] | None,
        patience: float,
    ) -> Any:
        import urllib3

        server = self._server
        url = f"{server}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "User-Agent": "mesh-launchers"}
        if body is not None:
            headers["Content-Type"] = _PATCH if method == "PATCH" else "application/json"
        try:
            headers |= self._authorization()
        except Exception as error:  # a plugin of the user's
            raise ApiError(f"there are no credentials for {server}: {error}", was_sent=False) from error
        try:
            response = self._pool.request(
                method,
                url,
                headers=headers,
                body=None if body is None else json.dumps(body).encode(),
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=patience),
                preload_content=False,
                # Whether to try again is decided by the caller.
                retries=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            unconnected = urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError
            raise ApiError(
                f"the API server {server} cannot be reached: {error}",
                was_sent=not isinstance(error, unconnected),
            ) from error
        if response.status >= 400:
            raise _refusal(response)
        return response

    def _authorization(self) -> dict[str, str]:
        """Return the header with the user's credentials, with a new token if the last one has expired."""
        # A plugin that gets tokens must run once, and not in each thread.
        with self._signing:
            return self._sign()

    def watch(
        self, path: str, query: Mapping[str, Any], opened: Callable[[Callable[[], None]], None]
    ) -> Iterator[Json]:
        """Yield the events of a watch. `opened` is called with a function that ends it from another thread."""
        import urllib3

        asked = {**query, "watch": "true", "timeoutSeconds": _WATCH_S}
        response = self._send("GET", path, None, asked, _WATCH_S + _ANSWER_S)
        try:
            opened(lambda: _cut(response))
            rest = b""
            for piece in response.stream(decode_content=True):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    event: Json = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiError(
                            str(status.get("message")),
                            status=int(status.get("code", 0)),
                            reason=str(status.get("reason", "")),
                        )
                    yield event
        except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            raise ApiError(f"the watch of the API server has ended: {error}") from error
        finally:
            response.close()

    # From the event loop.

    async def ask(
        self, method: str, path: str, body: Json | None = None, query: Mapping[str, Any] | None = None
    ) -> Json:
        """Send a request. Once sent it is completed, even if its caller is cancelled."""
        return await self._apart(lambda: self.request(method, path, body, query))

    async def text(self, path: str, query: Mapping[str, Any]) -> str:
        """Return an answer that is not JSON."""
        data = await self._apart(lambda: self._read("GET", path, None, query))
        return data.decode(errors="replace")

    async def _apart(self, work: Callable[[], _T]) -> _T:
        task = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Whoever cleans up must know about an object that is created in the meantime.
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
            raise

    def close(self) -> None:
        """Close connections and threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.clear()


def _namespace_of(file: str | None, context: str | None) -> str | None:
    from kubernetes import config

    contexts, active = config.list_kube_config_contexts(file)
    chosen = next((each for each in contexts if each["name"] == context), active)
    found: str | None = chosen["context"].get("namespace")
    return found


def _refusal(response: Any) -> ApiError:
    """Return the server's answer as an error."""
    data = response.read(decode_content=True).decode(errors="replace")
    response.release_conn()
    try:
        told = json.loads(data)
        message, reason = str(told["message"]), str(told.get("reason", ""))
    except (ValueError, KeyError, TypeError):
        message, reason = data.strip() or str(response.reason), ""
    if response.status == 401:
        message = f"{message}: the credentials of the kubeconfig, or of the service account, are not valid or have expired; log in again"
    return ApiError(f"Kubernetes: {message}", status=response.status, reason=reason)


def _cut(response: Any) -> None:
    """End a stream that another thread reads."""
    connection = getattr(response, "connection", None) or getattr(response, "_connection", None)
    sock = getattr(connection, "sock", None)
    if sock is not None:
        # Closing it alone would leave the other thread waiting.
        with contextlib.suppress(OSError):
            sock.shutdown(2)
