"""Spans of spawns, calls and endpoints, and the context that they pass between processes."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import Actor, Pool, ProcMesh, Promise, endpoint, inspect, shutdown, this_host

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytestmark = pytest.mark.python

CLIENT, SERVER, PRODUCER, CONSUMER = "CLIENT", "SERVER", "PRODUCER", "CONSUMER"


class Seen:
    """A span in a form that can be sent."""

    def __init__(self, span: ReadableSpan) -> None:
        assert span.context is not None
        self.name = span.name
        self.kind = span.kind.name
        self.trace = span.context.trace_id
        self.id = span.context.span_id
        self.parent = None if span.parent is None else span.parent.span_id
        self.attributes = dict(span.attributes or {})
        self.failed = not span.status.is_ok and span.status.status_code.name == "ERROR"
        self.exceptions = [str((event.attributes or {}).get("exception.type")) for event in span.events]
        self.start, self.end = span.start_time or 0, span.end_time or 0

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"


def record() -> InMemorySpanExporter:
    """Set a provider for this process, once."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        provider.kept = InMemorySpanExporter()  # type: ignore[attr-defined]
        provider.add_span_processor(SimpleSpanProcessor(provider.kept))  # type: ignore[attr-defined]
        trace.set_tracer_provider(provider)
    kept: InMemorySpanExporter = provider.kept  # type: ignore[attr-defined]
    return kept


def begin_recording() -> None:
    """Bootstrap a worker with a provider."""
    record()


class Worker(Actor):
    def __init__(self, ok: bool = True) -> None:
        if not ok:
            raise ValueError("not ok")

    @endpoint
    def spans(self) -> list[Seen]:
        return [Seen(span) for span in record().get_finished_spans()]

    @endpoint
    def step(self, n: int) -> int:
        return n + 1

    @endpoint
    async def step_async(self, n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    @endpoint(concurrent=True)
    async def step_concurrent(self, n: int) -> int:
        await asyncio.sleep(0)
        return n + 1

    @endpoint
    def fail(self) -> None:
        raise KeyError("gone")

    @endpoint
    async def fail_async(self) -> None:
        raise KeyError("gone")

    @endpoint
    def ask(self, other: Any, n: int) -> int:
        return int(other.step.call_one(n).get())

    @endpoint
    async def ask_async(self, other: Any, n: int) -> int:
        return int(await other.step_async.call_one(n))

    @endpoint
    def parent_here(self) -> int:
        return trace.get_current_span().get_span_context().trace_id


@pytest.fixture
def kept() -> Iterator[InMemorySpanExporter]:
    """Record the spans of this process, with tracing on."""
    exporter = record()
    exporter.clear()
    assert inspect.trace()
    yield exporter
    shutdown()


@pytest.fixture
def own(kept: InMemorySpanExporter) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}, "traced", bootstrap=begin_recording) as procs:
        procs.initialized.get()
        yield procs


def here(kept: InMemorySpanExporter) -> list[Seen]:
    return [Seen(span) for span in kept.get_finished_spans()]


def one(spans: list[Seen], name: str, kind: str) -> Seen:
    found = [span for span in spans if (span.name, span.kind) == (name, kind)]
    assert len(found) == 1, f"{name} {kind} in {spans}"
    return found[0]


@pytest.mark.parametrize("method", ["step", "step_async", "step_concurrent"])
def test_a_call_and_its_handling(kept: InMemorySpanExporter, own: ProcMesh, method: str) -> None:
    worker = own.slice(gpus=1).spawn("worker", Worker)
    with trace.get_tracer("test").start_as_current_span("outer") as outer:
        assert getattr(worker, method).call_one(1).get() == 2
    sent = one(here(kept), f"Worker/{method}", CLIENT)
    assert sent.trace == outer.get_span_context().trace_id
    assert sent.parent == outer.get_span_context().span_id
    assert sent.attributes["rpc.system.name"] == "mesh"
    assert sent.attributes["rpc.method"] == f"Worker/{method}"
    assert (sent.attributes["mesh.actor"], sent.attributes["mesh.adverb"]) == ("worker", "call_one")
    handled = one(worker.spans.call_one().get(), f"Worker/{method}", SERVER)
    assert (handled.trace, handled.parent) == (sent.trace, sent.id)
    assert (handled.attributes["mesh.rank"], handled.attributes["mesh.proc"]) == (0, "traced[1]")
    assert sent.start <= handled.start <= handled.end <= sent.end
    assert not sent.failed and not handled.failed


@pytest.mark.once
def test_a_call_to_many_is_one_span(kept: InMemorySpanExporter, own: ProcMesh) -> None:
    workers = own.spawn("workers", Worker)
    assert workers.step.call(1).get().values() == [2, 2]
    sent = one(here(kept), "Worker/step", CLIENT)
    assert sent.attributes["mesh.actors"] == 2
    for spans in workers.spans.call().get().values():
        assert one(spans, "Worker/step", SERVER).parent == sent.id
    assert [one.get() for one in workers.step.stream(1)] == [2, 2]
    streamed = [span for span in here(kept) if span.attributes.get("mesh.adverb") == "stream"]
    assert [span.name for span in streamed] == ["Worker/step"]


@pytest.mark.parametrize(("asking", "asked"), [("ask", "step"), ("ask_async", "step_async")])
def test_nested_calls_are_children(
    kept: InMemorySpanExporter, own: ProcMesh, asking: str, asked: str
) -> None:
    first, second = (own.slice(gpus=n).spawn(f"worker{n}", Worker) for n in range(2))
    assert getattr(first, asking).call_one(second, 1).get() == 2
    top = one(here(kept), f"Worker/{asking}", CLIENT)
    spans = first.spans.call_one().get()
    outer = one(spans, f"Worker/{asking}", SERVER)
    inner = one(spans, f"Worker/{asked}", CLIENT)
    last = one(second.spans.call_one().get(), f"Worker/{asked}", SERVER)
    assert (outer.parent, inner.parent, last.parent) == (top.id, outer.id, inner.id)
    assert {outer.trace, inner.trace, last.trace} == {top.trace}


@pytest.mark.parametrize("method", ["fail", "fail_async"])
def test_errors_are_recorded_at_both_ends(kept: InMemorySpanExporter, own: ProcMesh, method: str) -> None:
    worker = own.slice(gpus=0).spawn("worker", Worker)
    with pytest.raises(KeyError):
        getattr(worker, method).call_one().get()
    sent = one(here(kept), f"Worker/{method}", CLIENT)
    handled = one(worker.spans.call_one().get(), f"Worker/{method}", SERVER)
    for span in (sent, handled):
        assert span.failed
        assert span.attributes["error.type"] == "KeyError"
        assert span.exceptions
    assert worker.step.call_one(1).get() == 2


@pytest.mark.once
def test_a_broadcast_is_a_message(kept: InMemorySpanExporter, own: ProcMesh) -> None:
    worker = own.slice(gpus=0).spawn("worker", Worker)
    worker.step.broadcast(1)
    sent = one(here(kept), "broadcast worker", PRODUCER)
    assert sent.attributes["messaging.operation.type"] == "send"
    handled = one(worker.spans.call_one().get(), "process worker", CONSUMER)
    assert handled.parent == sent.id
    assert handled.attributes["messaging.destination.name"] == "worker"
    assert handled.attributes["mesh.endpoint"] == "step"


@pytest.mark.once
def test_spawns_and_constructors(kept: InMemorySpanExporter, own: ProcMesh) -> None:
    worker = own.slice(gpus=0).spawn("worker", Worker)
    # Each actor is constructed on its own thread, so their spans end in any order.
    worker.initialized.get(timeout=30)
    broken = own.slice(gpus=0).spawn("broken", Worker, ok=False)
    assert isinstance(broken.initialized.exception(), ValueError)
    spans = here(kept)
    assert one(spans, "spawn traced", CLIENT).attributes["mesh.count"] == 2
    made = [span for span in worker.spans.call_one().get() if span.name == "Worker/__init__"]
    assert [span.parent for span in made] == [
        one(spans, f"spawn {name}", CLIENT).id for name in ("worker", "broken")
    ]
    assert [span.failed for span in made] == [False, True]


def test_an_unclaimed_result_ends_its_span(kept: InMemorySpanExporter, own: ProcMesh) -> None:
    worker = own.slice(gpus=0).spawn("worker", Worker)
    future = worker.step.call_one(1)
    assert not [span for span in here(kept) if span.name == "Worker/step"]
    del future
    assert one(here(kept), "Worker/step", CLIENT)
    with pytest.raises(TypeError):
        worker.step.call_one(1, 2, 3)
    assert len([span for span in here(kept) if span.name == "Worker/step"]) == 1


def test_a_span_ends_when_the_reply_arrives_not_when_it_is_read(
    kept: InMemorySpanExporter, own: ProcMesh
) -> None:
    worker = own.slice(gpus=0).spawn("worker", Worker)
    future = worker.step.call_one(1)
    while not future.done():
        pass
    later = [worker.step.call_one(1).get() for _ in range(50)]
    future.get()
    *others, first = (span.end for span in here(kept) if span.name == "Worker/step")
    # It is read last, and arrived before the others were sent. All these times are by the same clock.
    assert len(others) == len(later) and first <= min(others)


@pytest.mark.once
def test_it_can_be_turned_off(kept: InMemorySpanExporter, own: ProcMesh) -> None:
    worker = own.slice(gpus=0).spawn("worker", Worker)
    assert inspect.trace(False) is False
    assert worker.step.call_one(1).get() == 2
    own.slice(gpus=0).spawn("other", Worker)
    assert not [span for span in here(kept) if span.name in ("Worker/step", "spawn other")]
    assert inspect.trace() is True
    assert worker.step.call_one(1).get() == 2
    assert one(here(kept), "Worker/step", CLIENT)


@pytest.mark.once
def test_workers_without_a_provider_handle_traced_calls(kept: InMemorySpanExporter) -> None:
    with this_host().spawn_procs() as procs:
        worker = procs.spawn("worker", Worker)
        assert worker.step.call_one(1).get() == 2
        assert worker.parent_here.call_one().get() == 0


def run(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_mesh_does_not_import_opentelemetry() -> None:
    told = run(
        """
        import sys
        from mesh_core import Actor, endpoint, inspect, this_host

        with this_host().spawn_procs() as procs:
            procs.initialized.get()
            assert inspect.trace() is False
        print([name for name in sys.modules if name.startswith("opentelemetry")])
        """
    )
    assert told == "[]"


def test_a_provider_that_is_set_later_is_noticed() -> None:
    told = run(
        """
        from mesh_core import this_host
        from mesh_core._common.current import current
        from opentelemetry import trace

        process = current()
        with this_host().spawn_procs() as procs:
            print(process.tracer)
        from opentelemetry.sdk.trace import TracerProvider
        trace.set_tracer_provider(TracerProvider())
        with this_host().spawn_procs() as procs:
            print(process.tracer is not None)
        """
    )
    assert told.split() == ["None", "True"]


# Promises.


def test_a_promise_is_a_span_that_ends_with_its_outcome(kept: InMemorySpanExporter) -> None:
    with trace.get_tracer("test").start_as_current_span("outer") as outer:
        promise = Promise[int]("weights")
    assert here(kept)[-1].name == "outer"
    promise.set_result(1)
    kept_at = time.time_ns()
    assert promise.future.get() == promise.future.get() == 1
    span = one(here(kept), "promise weights", "INTERNAL")
    assert span.parent == outer.get_span_context().span_id
    assert span.attributes == {"mesh.promise": "weights"}
    assert span.start <= span.end <= kept_at
    assert not span.failed


@pytest.mark.once
def test_a_promise_that_fails_is_a_failed_span(kept: InMemorySpanExporter) -> None:
    promise = Promise[int]()
    promise.set_exception(KeyError("gone"))
    with pytest.raises(KeyError):
        promise.future.get()
    span = one(here(kept), "promise", "INTERNAL")
    assert span.failed and span.exceptions == ["KeyError"] and span.attributes["error.type"] == "KeyError"


@pytest.mark.once
def test_a_promise_finished_by_a_descriptor_has_a_span(kept: InMemorySpanExporter) -> None:
    promise = Promise[int]("native", finish=lambda status: status)
    write = promise.descriptor()
    os.write(write, (3).to_bytes(4, sys.byteorder))
    os.close(write)
    assert promise.future.get(timeout=30) == 3
    assert not one(here(kept), "promise native", "INTERNAL").failed


@pytest.mark.once
def test_an_unread_promise_has_a_span(kept: InMemorySpanExporter) -> None:
    done, dropped = Promise[int]("done"), Promise[int]("dropped")
    done.set_result(1)
    given_up = dropped.future
    given_up.cancel()
    del done, dropped, given_up
    gc.collect()
    assert not one(here(kept), "promise done", "INTERNAL").failed
    assert "mesh.abandoned" not in one(here(kept), "promise dropped", "INTERNAL").attributes


@pytest.mark.once
def test_the_tasks_of_a_pool_have_the_spans_of_their_calls(kept: InMemorySpanExporter, own: ProcMesh) -> None:
    workers = own.spawn("pooled", Worker)
    with trace.get_tracer("test").start_as_current_span("all of them") as mine, Pool(workers) as pool:
        assert sorted(pool.map_unordered(workers.step, range(6))) == [1, 2, 3, 4, 5, 6]
    calls = [span for span in here(kept) if (span.name, span.kind) == ("Worker/step", CLIENT)]
    assert [call.parent for call in calls] == [mine.get_span_context().span_id] * 6
