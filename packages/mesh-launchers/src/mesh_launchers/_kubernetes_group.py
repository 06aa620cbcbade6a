"""The hosts of one Job of Kubernetes, from its creation to its end.

K8S-3: hosts do not outlive the process that keeps their job. That process extends the Job's deadline and changes a file in each pod; when it stops,
Kubernetes ends the Job at the deadline, and each host ends itself once the file has not changed for too long.
K8S-4: losing the connection to the API server is not a failure of any host. The pods are listed again when the server answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mesh_core.extensions import naming
from mesh_launchers import _kubernetes_objects as objects
from mesh_launchers import _kubernetes_pods as pods
from mesh_launchers._contract import HostSpec, Phase, Place, Report
from mesh_launchers._durations import seconds
from mesh_launchers._errors import LaunchError
from mesh_launchers._host import told
from mesh_launchers._kubernetes_api import ApiError, Cluster
from mesh_launchers._kubernetes_options import KubernetesOptions
from mesh_launchers._kubernetes_watch import PodWatch

Json = dict[str, Any]

_LOOK_S = 1.0
_RUNNING_LOOK_S = 15.0
_LISTEN_S = 0.05
_LOG_BYTES = 1 << 18
_LEAST_SILENCE_S = 300.0
"""It takes up to two minutes until pods see a change of a Secret."""
_DEADLINE = 2
"""The Job's deadline, in multiples of the silence after which hosts end themselves."""
_SETTLED_S = 3.0
"""In its first moments a Job's pods may be refused for a passing reason, such as the missing service account of a new namespace."""
_END_S = 10.0
_REACH_S = 10.0


class _Host:
    """One host, with what is known of its pod."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.pod: Json | None = None
        self.environment: Mapping[str, Any] | None = None
        self.waits_since: float | None = None
        """Since when the scheduler has found no node."""
        self.runs = False
        self.address: str | None = None
        """Where its agent listens, once it runs; ``None`` if it connects to the script."""
        self.listening: asyncio.Task[None] | None = None
        self.over = False
        self.ending = False
        self.words = ""
        """Why it waits."""
        self.last_log = ""

    @property
    def pod_name(self) -> str | None:
        return None if self.pod is None else str(self.pod["metadata"]["name"])


class Group:
    """Hosts that were started together."""

    def __init__(
        self,
        place: Place,
        cluster: asyncio.Future[Cluster],
        names: objects.Names,
        options: KubernetesOptions,
        specs: Sequence[HostSpec],
    ) -> None:
        self._place = dataclasses.replace(place, silence=max(place.silence, _LEAST_SILENCE_S))
        self._found = cluster
        self._cluster: Cluster
        self._options = options
        self._names = names
        self.name = names.name
        self.hosts = {each.number: _Host(each) for each in specs}
        self._by_index = list(self.hosts.values())
        self._may_be_there = False
        """Whether a Job was requested, and the outcome is unknown."""
        self._begun = time.monotonic()
        self._made = 0.0
        """When the Job was created, by a clock that continues while this machine sleeps, as Kubernetes' does."""
        self._beats = 0
        self._order = ""
        """What the hosts were told last."""
        self._grace = 0.0
        self._has_credentials = False
        self._trouble = ""
        self._changed = asyncio.Event()
        self._watch: PodWatch | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Begin to start the hosts."""
        self._report(self.hosts.values(), Phase.WAITING)
        self._spawn(self._live())

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report(self, hosts: Iterable[_Host], phase: Phase, why: str = "") -> None:
        for each in hosts:
            address = each.address if phase is Phase.RUNNING else None
            self._place.report(Report(each.spec.number, phase, why, address, each.environment))

    def _left(self) -> list[_Host]:
        return [each for each in self.hosts.values() if not each.over and not each.ending]

    def _fail(self, hosts: Iterable[_Host], why: str) -> None:
        for each in hosts:
            if not each.over and not each.ending:
                each.over = True
                self._report([each], Phase.FAILED, why)
        self._changed.set()

    # Beginning.

    async def _live(self) -> None:
        try:
            # Other hosts use it too.
            self._cluster = await asyncio.shield(self._found)
            await self._create()
            loop = asyncio.get_running_loop()
            self._watch = PodWatch(
                self._cluster,
                f"{objects.GROUP_LABEL}={self.name}",
                loop.call_soon_threadsafe,
                listed=self._listed,
                changed=self._seen,
                gone=self._pod_gone,
                trouble=self._troubled,
            )
            self._watch.start()
            self._spawn(self._beat())
            await self._oversee()
        except Exception as error:  # noqa: BLE001 - the reason of these hosts' failure
            known = isinstance(error, ApiError | LaunchError)
            self._fail(self._left(), str(error) if known else f"{type(error).__name__}: {error}")
            # None of its hosts will be used.
            with suppress(ApiError, LaunchError):
                await self._remove()

    async def _create(self) -> None:
        """Create the Job and what it owns."""
        options, count = self._options, len(self.hosts)
        self._begun, self._made = time.monotonic(), _awake_or_asleep()
        manifest = objects.job(self._names, count, options, _DEADLINE * self._place.silence)
        # What was submitted can be read, since clusters have rules of their own.
        file = self._place.folder / f"{self.name}.json"
        with naming(file):
            file.write_text(json.dumps(manifest, indent=2) + "\n")
        self._may_be_there = True
        try:
            job = await self._cluster.ask("POST", self._cluster.path("jobs"), manifest)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                self._may_be_there = False
                raise LaunchError(
                    f"the namespace {self._cluster.namespace!r} has a Job {self.name!r} already, which somebody else has launched, or whose hosts are "
                    f"ending: choose another name, or remove it with `kubectl delete job {self.name} --namespace {self._cluster.namespace}`"
                ) from error
            self._may_be_there = error.status == 0 and error.was_sent
            raise
        if "backoffLimitPerIndex" not in job["spec"]:
            raise LaunchError(
                "this cluster is older than Kubernetes 1.29, whose Jobs cannot be used for hosts"
            )
        # A template may have changed it.
        grace = job["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", options.grace)
        self._grace = options.notice(grace)
        line = self._told()
        made = [
            self._cluster.ask("POST", self._cluster.path("secrets"), objects.secret(self._names, job, line))
        ]
        if options.service:
            made.append(
                self._cluster.ask("POST", self._cluster.path("services"), objects.service(self._names, job))
            )
        done = await asyncio.gather(*made, return_exceptions=True)
        if failed := next((each for each in done if isinstance(each, BaseException)), None):
            raise failed
        self._has_credentials = True

    def _told(self) -> bytes:
        """Return what the hosts read when they start."""
        options = self._options
        where: dict[str, Any] = (
            {"address": options.listen} if options.dial is None else {"dial": options.dial}
        )
        return told(
            self._place,
            [each.spec for each in self._by_index],
            variable=objects.INDEX_VARIABLE,
            beat=f"{objects.FOLDER}/{objects.BEAT}",
            grace=self._grace,
            **where,
            resources={"gpus": float(options.gpus)} if options.gpus else {},
        )

    async def renew(self, order: str) -> None:
        """Give the hosts new certificates; each of the later beats repeats that, for those that start meanwhile."""
        self._order = order
        if not self._left() or not self._made:
            return
        if self._has_credentials:
            await self._patched("secrets", objects.renewed(self._told()))
        if not await self._say_alive():
            raise LaunchError(f"the API server has not taken them for {self.name}: {self._trouble}")

    async def _find(self) -> Json | None:
        """Return the Job, if it is there and ours."""
        try:
            job = await self._cluster.ask("GET", self._cluster.path("jobs", self.name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        if (job["metadata"].get("annotations") or {}).get(objects.RUN) != self._names.run:
            return None
        return job

    # While they run.

    async def _oversee(self) -> None:
        """Check what no pod's status says: time limits, pods that were refused, and the Job itself."""
        begun = looked = time.monotonic()
        while self._left():
            coming = [each for each in self._left() if not each.runs]
            now = time.monotonic()
            # A queue of hours need not be looked at each second.
            if coming and now - looked >= min(max(_LOOK_S, (now - begun) / 20), _RUNNING_LOOK_S):
                looked = now
                with suppress(ApiError):
                    await self._look_for_reasons([each for each in coming if each.listening is None])
            self._apply_limits([each for each in coming if each.listening is None])
            if not coming and self._has_credentials:
                # All hosts have read the credentials, and no pod is ever created again.
                self._has_credentials = not await self._patched("secrets", objects.without_credentials())
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _LOOK_S if coming else _RUNNING_LOOK_S)
        if self._has_credentials:
            await self._patched("secrets", objects.without_credentials())

    def _apply_limits(self, hosts: Sequence[_Host]) -> None:
        now = time.monotonic()
        queue, scheduler = self._options.queue_timeout, self._options.unschedulable_timeout
        for each in hosts:
            if queue is not None and now > self._begun + seconds(queue, "queue_timeout"):
                self._give_up(each, f"it has waited {queue} for a node and its container: {each.words}")
            elif scheduler is not None and each.waits_since is not None:
                limit = seconds(scheduler, "unschedulable_timeout") if scheduler else 0.0
                if now >= each.waits_since + limit:
                    self._give_up(each, f"Kubernetes finds no node for it: {each.words}")

    def _give_up(self, host: _Host, why: str) -> None:
        """Report a host as failed that may still start, and delete its pod so that it does not."""
        self._fail([host], why)
        if host.pod is not None:
            self._spawn(self._delete_pod(host.pod, None))

    async def _look_for_reasons(self, hosts: Sequence[_Host]) -> None:
        """Find out why hosts do not start, where their pods do not say why or do not exist."""
        if not hosts:
            return
        job = await self._find()
        if job is None:
            self._fail(self._left(), f"its Job {self.name} was deleted")
            return
        conditions = (job.get("status") or {}).get("conditions") or []
        for each in conditions:
            if each["type"] == "Failed" and each["status"] == "True":
                self._fail(hosts, f"its Job has failed: {each.get('reason')}: {each.get('message')}")
                return
            if each["type"] == "Suspended" and each["status"] == "True":
                self._wait(hosts, f"{each.get('reason')}: {each.get('message')}")
        none = [each for each in hosts if each.pod is None]
        if none and (events := await self._events(job)):
            why, final = pods.refusal(events, len(self.hosts))
            if why and final and time.monotonic() > self._begun + _SETTLED_S:
                self._fail(none, f"Kubernetes will not start it: {why}")
            elif why:
                self._wait(none, why)
        # Pods usually wait for the same volume or registry: ask for the events of one.
        quiet = next((each for each in hosts if each.pod is not None and pods.is_quiet(each.pod)), None)
        if (
            quiet is not None
            and quiet.pod is not None
            and (why := pods.newest(await self._events(quiet.pod)))
        ):
            self._wait([quiet], why)

    async def _events(self, of: Json) -> list[Json]:
        query = {"fieldSelector": f"involvedObject.uid={of['metadata']['uid']}"}
        try:
            found: list[Json] = (await self._cluster.ask("GET", self._cluster.path("events"), query=query))[
                "items"
            ]
        except ApiError as error:
            if error.status != 403:
                raise
            # Without the right to list events, the reason stays unknown.
            return []
        return found

    def _wait(self, hosts: Iterable[_Host], why: str) -> None:
        for each in hosts:
            if why != each.words and not each.over:
                each.words = why
                self._report([each], Phase.WAITING, why)

    async def _beat(self) -> None:
        """Tell Kubernetes and the hosts that this process is alive (K8S-3)."""
        silence = self._place.silence
        while self._left():
            await asyncio.sleep(silence / 6)
            after = _awake_or_asleep() - self._made + _DEADLINE * silence
            await asyncio.gather(self._say_alive(), self._patched("jobs", objects.deadline(after)))

    async def _say_alive(self) -> bool:
        self._beats += 1
        return await self._patched("secrets", objects.beat(self._beats, self._order))

    async def _patched(self, kind: str, change: Json) -> bool:
        """Change one of the objects; return whether there is nothing left to retry."""
        try:
            await self._cluster.ask("PATCH", self._cluster.path(kind, self.name), change)
        except ApiError as error:
            self._troubled(str(error))
            return error.is_final
        return True

    def _troubled(self, why: str) -> None:
        """Report that the API server does not answer, or that it answers again."""
        if why != self._trouble:
            self._trouble = why
            # The keeper's log has it.
            sys.stderr.write(f"{why or 'the API server answers'}\n")
            running = [each for each in self._left() if each.runs]
            self._report(running, Phase.RUNNING, why)

    # Reports about pods.

    def _listed(self, items: list[Json]) -> None:
        for each in items:
            self._seen(each)
        there = {each["metadata"]["uid"] for each in items}
        for host in self.hosts.values():
            if host.pod is not None and host.pod["metadata"]["uid"] not in there:
                # The list may be older than what was seen before.
                self._spawn(self._look_for(host))

    async def _look_for(self, host: _Host) -> None:
        pod = host.pod
        with suppress(ApiError):
            if pod is not None and not await self._is_there(pod):
                self._pod_gone(pod)

    async def _is_there(self, pod: Json) -> bool:
        try:
            found = await self._cluster.ask("GET", self._cluster.path("pods", pod["metadata"]["name"]))
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return bool(found["metadata"]["uid"] == pod["metadata"]["uid"])

    def _host_of(self, pod: Json) -> _Host | None:
        index = pods.index_of(pod)
        return None if index is None or index >= len(self._by_index) else self._by_index[index]

    def _pod_gone(self, pod: Json) -> None:
        host = self._host_of(pod)
        if (
            host is not None
            and host.pod is not None
            and host.pod["metadata"]["uid"] == pod["metadata"]["uid"]
        ):
            host.pod = None
            if not host.over and not host.ending:
                self._fail([host], pods.look(pod).why or "its pod was deleted")
        self._changed.set()

    def _seen(self, pod: Json) -> None:
        host = self._host_of(pod)
        if host is None:
            return
        if host.over or host.ending:
            # A pod that was created for a host that is no longer wanted.
            if host.pod is None and not pod["metadata"].get("deletionTimestamp"):
                host.pod = pod
                if host.ending or (pod.get("status") or {}).get("phase") not in {"Failed", "Succeeded"}:
                    self._spawn(self._delete_pod(pod, None))
            elif host.pod is not None:
                host.pod = pod
            return
        host.pod = pod
        seen = pods.look(pod)
        if seen.phase is Phase.FAILED:
            host.over = True
            self._spawn(self._tell_failure(host, pod, seen))
        elif host.listening is not None:
            pass  # its container has started already: this list is older than what was seen before
        elif seen.phase is Phase.WAITING:
            if not seen.unschedulable:
                host.waits_since = None
            elif host.waits_since is None:
                host.waits_since = time.monotonic()
            if seen.why:
                self._wait([host], seen.why)
        else:
            host.listening = self._spawn(self._listen(host))
        self._changed.set()

    async def _listen(self, host: _Host) -> None:
        """Wait until a host's agent listens: it says so in its log."""
        self._report([host], Phase.STARTING)
        begun, words = time.monotonic(), ""
        while not host.over and not host.ending:
            try:
                said = pods.spoken(await self._log(host, {"limitBytes": _LOG_BYTES}))
            except ApiError as error:
                said, words = {}, str(error)
                if error.status == 403:
                    self._give_up(host, f"its log cannot be read, which says where it listens: {error}")
                    return
            if "environment" in said and host.environment is None:
                host.environment = said["environment"]
                self._report([host], Phase.STARTING)
            if host.over or host.ending or await self._has_come(host, said):
                return
            if "unreached" in said:
                words = f"{host.spec.name} cannot connect to the script at {self._options.dial}: {said['unreached']}"
                self._report([host], Phase.STARTING, words)
            waited = time.monotonic() - begun
            if waited > self._options.start_timeout:
                lines = words or pods.written(host.last_log, 12)
                why = f"it has not listened after {self._options.start_timeout:g} s"
                self._give_up(host, f"{why}\n{lines}" if lines else why)
                return
            # Often at first, and then in proportion.
            await asyncio.sleep(min(max(_LISTEN_S, waited / 8), _LOOK_S))

    async def _has_come(self, host: _Host, said: Mapping[str, Any]) -> bool:
        """Return whether waiting for a host is over, and report how: it runs, or the script's machine cannot reach it."""
        ip = (host.pod or {}).get("status", {}).get("podIP")
        if "address" in said and ip:
            port = str(said["address"]).rpartition(":")[2]
            address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
            if why := await _unreachable(ip, int(port)):
                self._give_up(
                    host,
                    f"the script's machine cannot connect to {host.spec.name} at {address}: {why}. Run the script in the cluster, or where pods "
                    "can be reached, or have the hosts connect to it (dial=)",
                )
                return True
            host.address = f"tcp://{address}"
        elif "dials" not in said:
            return False
        host.runs = True
        if not host.over and not host.ending:
            self._report([host], Phase.RUNNING)
        self._changed.set()
        return True

    async def _tell_failure(self, host: _Host, pod: Json, seen: pods.Seen) -> None:
        """Report a host's failure, with its own last words."""
        if seen.has_log:
            with suppress(ApiError):
                await self._log(host, {"tailLines": 200})
        why = str(pods.spoken(host.last_log).get("failed") or seen.why)
        if seen.why not in why:
            why = f"{why} ({seen.why})"
        lines = pods.written(host.last_log, 12)
        if not host.ending:
            self._report([host], Phase.FAILED, f"{why}\n{lines}" if lines else why)
        self._changed.set()

    async def _log(self, host: _Host, query: Mapping[str, Any]) -> str:
        """Read a host's log; what was read last stays, as it goes with the pod."""
        if host.pod_name is None:
            return host.last_log
        path = self._cluster.path("pods", host.pod_name, "log")
        host.last_log = await self._cluster.text(path, {"container": objects.CONTAINER, **query})
        return host.last_log

    async def log(self, number: int, lines: int) -> str:
        """Return the last lines of a host."""
        host = self.hosts[number]
        if not self._may_be_there:
            return pods.written(host.last_log, lines)
        try:
            # The program's own messages are not counted.
            text = await self._log(host, {"tailLines": lines + 200})
        except ApiError as error:
            if not host.last_log:
                return str(error)
            text = host.last_log
        return pods.written(text, lines)

    # Ending.

    async def stop(self, numbers: Iterable[int]) -> None:
        """End hosts, and the Job with the last of them."""
        mine = [self.hosts[each] for each in numbers if each in self.hosts]
        if not mine:
            return
        for each in mine:
            each.ending = True
        if all(each.ending or each.over for each in self.hosts.values()):
            await self._remove()
        else:
            await asyncio.gather(
                *[self._delete_pod(each.pod, self._options.grace) for each in mine if each.pod is not None]
            )
        for each in mine:
            each.over = True
        self._report(mine, Phase.ENDED)

    async def _delete_pod(self, pod: Json, grace: float | None) -> None:
        """Delete a pod. With a `grace`, wait until it is gone; its node may be dead, and then nobody else removes it."""
        path = self._cluster.path("pods", pod["metadata"]["name"])
        precondition = {"preconditions": {"uid": pod["metadata"]["uid"]}}
        with suppress(ApiError):
            await self._cluster.ask("DELETE", path, precondition)
        if grace is None:
            return
        if pods.is_lost(pod) or not await self._until_gone(pod, grace + _END_S):
            with suppress(ApiError):
                await self._cluster.ask("DELETE", path, {"gracePeriodSeconds": 0, **precondition})
            await self._until_gone(pod, _END_S)

    async def _until_gone(self, pod: Json, limit: float) -> bool:
        end, pause = time.monotonic() + limit, _LISTEN_S
        while time.monotonic() < end:
            with suppress(ApiError):
                if not await self._is_there(pod):
                    return True
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LOOK_S)
        return False

    async def _remove(self) -> None:
        """Delete the Job and everything it owns; nothing is left when this returns."""
        current = asyncio.current_task()
        others = [each for each in self._tasks if each is not current]
        for each in others:
            each.cancel()
        if others:
            await asyncio.wait(others)
        if self._watch is not None:
            self._watch.close()
        if not self._may_be_there:
            return
        end, error = time.monotonic() + self._options.grace + 2 * _END_S, None
        forced = False
        for host in self.hosts.values():
            if host.pod is not None and pods.is_lost(host.pod):
                await self._delete_pod(host.pod, 0.0)
        pause = _LISTEN_S
        while time.monotonic() < end:
            try:
                if await self._is_removed():
                    self._may_be_there = False
                    return
                if not forced and time.monotonic() > end - _END_S:
                    forced = True
                    await self._force()
            except ApiError as failure:
                error = failure
                if failure.is_final:
                    break
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, _LOOK_S)
        raise LaunchError(
            f"the Job {self.name} in the namespace {self._cluster.namespace!r} could not be removed: {error or 'its pods do not end'}. "
            f"Kubernetes ends it {_DEADLINE * self._place.silence:g} s after the last word from here, and removes it then"
        )

    async def _is_removed(self) -> bool:
        """Delete what exists, and return whether nothing did."""
        job = await self._find()
        if job is None:
            return not (await self._pods())
        if not job["metadata"].get("deletionTimestamp"):
            # The credentials first: the garbage collector would remove them only after the pods.
            kinds = ["secrets", "services"] if self._options.service else ["secrets"]
            for kind in kinds:
                with suppress(ApiError):
                    await self._cluster.ask("DELETE", self._cluster.path(kind, self.name))
            await self._cluster.ask(
                "DELETE",
                self._cluster.path("jobs", self.name),
                {"propagationPolicy": "Foreground", "preconditions": {"uid": job["metadata"]["uid"]}},
            )
        return False

    async def _pods(self) -> list[Json]:
        query = {"labelSelector": f"{objects.GROUP_LABEL}={self.name}"}
        found: list[Json] = (await self._cluster.ask("GET", self._cluster.path("pods"), query=query))["items"]
        return found

    async def _force(self) -> None:
        """Remove pods whose nodes do not answer."""
        for each in await self._pods():
            with suppress(ApiError):
                await self._cluster.ask(
                    "DELETE",
                    self._cluster.path("pods", each["metadata"]["name"]),
                    {"gracePeriodSeconds": 0, "preconditions": {"uid": each["metadata"]["uid"]}},
                )


def _awake_or_asleep() -> float:
    """Return seconds of a clock that also counts those in which this machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def _unreachable(ip: str, port: int) -> str:
    """Return why this machine, which is the script's, cannot connect to an agent; an empty text if it can."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), _REACH_S)
        writer.close()
    except (OSError, TimeoutError) as error:
        return "timed out" if isinstance(error, TimeoutError) else os.strerror(error.errno or 0)
    return ""
