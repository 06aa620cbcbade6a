"""Types with registered ways to be sent: reducers, and handlers of large data."""

from __future__ import annotations

import ctypes
import gc
import io
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import Actor, Promise, SerializationError, Undeliverable, endpoint, this_host
from mesh_core.extensions import (
    Extension,
    NotYet,
    Proc,
    Registration,
    dumps,
    find,
    install,
    loads,
    register_handler,
    register_reducer,
    uninstall,
)

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]

LARGE = 1_000_000


class Frame:
    """Owns memory that pickle cannot reach."""

    def __init__(self, label: str, memory: Any) -> None:
        self.label = label
        self.memory = memoryview(memory)
        self.lock = threading.Lock()

    @property
    def address(self) -> int:
        return address_of(self.memory)


def address_of(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def take(frame: Frame) -> tuple[str, list[memoryview]]:
    return frame.label, [frame.memory]


def make(label: str, buffers: list[memoryview]) -> Frame:
    return Frame(label, buffers[0])


class Frames(Extension):
    """Registers the handler in every process."""

    name = "frames"

    def start(self) -> None:
        self.registration = register_handler(Frame, take, make)

    def stop(self) -> None:
        self.registration.cancel()


@pytest.fixture
def handler() -> Iterator[Registration]:
    registration = register_handler(Frame, take, make)
    yield registration
    registration.cancel()


@pytest.fixture
def frames() -> Iterator[Frames]:
    yield install(Frames)
    uninstall("frames")


class Camera(Actor):
    """Returns and takes frames."""

    @endpoint
    def shoot(self, value: int) -> Frame:
        return Frame("shot", bytearray([value]) * LARGE)

    @endpoint
    def look(self, frame: Frame) -> tuple[str, int, int, bool]:
        return frame.label, len(frame.memory), frame.memory[-1], frame.memory.readonly

    @endpoint
    async def echo(self, frame: Frame) -> Frame:
        return frame


@pytest.mark.usefixtures("handler")
def test_large_data_is_not_copied_on_either_side() -> None:
    frame = Frame("a", bytearray(LARGE))
    data, buffers = dumps({"frame": frame})
    assert len(data) < 500
    assert [address_of(buffer) for buffer in buffers] == [frame.address]
    arrived = [bytearray(buffer) for buffer in buffers]
    rebuilt = loads(data, arrived)["frame"]
    assert (rebuilt.label, rebuilt.address) == ("a", address_of(arrived[0]))
    assert not rebuilt.memory.readonly


@pytest.mark.usefixtures("handler")
def test_an_object_that_occurs_twice_is_one_and_its_memory_lives_as_long_as_it() -> None:
    frame = Frame("a", bytearray(LARGE))
    data, buffers = dumps([frame, frame])
    assert len(buffers) == 1
    first, second = loads(data, [bytearray(buffers[0])])
    assert first is second

    class Memory(bytearray):
        """Supports weak references."""

    memory = Memory(buffers[0])
    rebuilt = loads(data, [memory])
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is not None
    del rebuilt
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("memory", [bytearray(b"small"), b"small", b"x" * LARGE, bytearray()])
def test_small_and_read_only_memory(memory: Any) -> None:
    data, buffers = dumps(Frame("a", memory))
    rebuilt = loads(data, [bytes(b) if b.readonly else bytearray(b) for b in buffers])
    assert bytes(rebuilt.memory) == bytes(memory)
    assert rebuilt.memory.readonly == isinstance(memory, bytes)


@pytest.mark.usefixtures("handler")
def test_classes_sent_by_value_may_contain_registered_objects() -> None:
    class Local:
        def __init__(self, frame: Frame) -> None:
            self.frame = frame

    frame = Frame("inner", bytearray(LARGE))
    data, buffers = dumps(Local(frame))
    assert [address_of(buffer) for buffer in buffers] == [frame.address]
    assert loads(data, buffers).frame.address == frame.address


@pytest.mark.usefixtures("frames")
@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_both_ways_between_processes(start: Any) -> None:
    with this_host().spawn_procs({"gpus": 2}, start=start) as procs:
        cameras: Any = procs.spawn("cameras", Camera)
        sent = Frame("sent", bytearray(b"\x07") * LARGE)
        assert cameras.look.call(sent).get(timeout=30).values() == [("sent", LARGE, 7, False)] * 2
        for frame in cameras.shoot.call(5).get(timeout=30).values():
            assert (frame.label, len(frame.memory), frame.memory[-1]) == ("shot", LARGE, 5)
            frame.memory[0] = 1
        assert cameras.slice(gpus=0).echo.call_one(sent).get(timeout=30).memory == sent.memory


def test_a_missing_handler_is_an_error(handler: Registration) -> None:
    with this_host().spawn_procs() as procs:
        camera: Any = procs.spawn("camera", Camera)
        frame = Frame("a", bytearray(LARGE))
        with pytest.raises(SerializationError) as caught:
            camera.look.call_one(frame).get(timeout=30)
        name = f"{Frame.__module__}.Frame"
        assert f"no handler for {name} is registered in this process, and the sender has one" in str(
            caught.value
        )
        assert "Call register_handler() here too" in str(caught.value)
        # Nor can it send one; the caller and the actor both continue.
        with pytest.raises(TypeError, match="lock"):
            camera.shoot.call_one(1).get(timeout=30)


def test_a_caller_without_the_handler_says_so() -> None:
    frames = install(Frames)
    try:
        with this_host().spawn_procs() as procs:
            camera: Any = procs.spawn("camera", Camera)
            frames.registration.cancel()
            with pytest.raises(
                SerializationError, match=r"no handler for .*Frame is registered in this process"
            ):
                camera.shoot.call_one(1).get(timeout=30)
            register_handler(Frame, take, make)
            assert camera.shoot.call_one(1).get(timeout=30).label == "shot"
    finally:
        frames.registration = register_handler(Frame, take, make)
        uninstall("frames")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda frame: frame.label, "must return a pair"),
        (lambda frame: (frame.label, [1]), "must return a pair"),
        (lambda frame: (frame.label, [frame.memory[::2]]), "is not contiguous"),
        (lambda frame: (frame.lock, [frame.memory]), "lock"),
        (lambda frame: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_an_incorrect_handler_is_reported(wrong: Callable[[Frame], Any], said: str) -> None:
    registration = register_handler(Frame, wrong, make)
    try:
        with pytest.raises(SerializationError, match=said):
            dumps(((Frame("a", bytearray(LARGE)),), {}))
    finally:
        registration.cancel()


def test_a_make_that_raises_fails_the_call_alone() -> None:
    def fail(label: str, buffers: list[memoryview]) -> Frame:
        raise ValueError("cannot make it")

    registration = register_handler(Frame, take, fail)
    try:
        data, buffers = dumps(Frame("a", bytearray(LARGE)))
        with pytest.raises(SerializationError, match="cannot make it"):
            loads(data, buffers)
    finally:
        registration.cancel()


def test_a_reducer_needs_nothing_at_the_receiver() -> None:
    registration = register_reducer(io.StringIO, lambda text: (io.StringIO, (text.getvalue(),)))
    try:
        with this_host().spawn_procs() as procs:
            reader: Any = procs.spawn("reader", Reader)
            assert reader.read.call_one(io.StringIO("text")).get(timeout=30) == "text"
    finally:
        registration.cancel()
        registration.cancel()


class Reader(Actor):
    @endpoint
    def read(self, text: io.StringIO) -> str:
        return text.read()


def test_what_is_refused(handler: Registration) -> None:
    for wrong in (int, bytes, dict, memoryview):
        with pytest.raises(TypeError, match="Mesh itself decides"):
            register_reducer(wrong, repr)
    with pytest.raises(TypeError, match="a registration must be for a class"):
        register_reducer("Frame", repr)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="make must be a function"):
        register_handler(Frame, take, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"already have a registration, made by .*take; cancel\(\) it first"):
        register_reducer(Frame, repr)


def test_a_module_that_is_imported_again_registers_again() -> None:
    source = """
from mesh_core.extensions import register_handler
class Thing:
    data = bytearray(1)
register_handler(Thing, lambda thing: (None, [thing.data]), lambda told, buffers: (made, bytes(buffers[0])))
"""
    module = types.ModuleType("again")
    sys.modules["again"] = module
    try:
        for made in range(2):
            vars(module)["made"] = made
            exec(source, vars(module))
            assert loads(*dumps(module.Thing())) == (made, b"\0")
    finally:
        del sys.modules["again"]


def test_registering_while_others_send() -> None:
    stop = threading.Event()
    raised: list[BaseException] = []

    def send() -> None:
        try:
            while not stop.is_set():
                loads(*dumps([{1, 2}, io.BytesIO]))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    for _ in range(300):
        register_handler(Frame, take, make).cancel()
    stop.set()
    thread.join()
    assert not raised


class Parcel:
    """Arrives later than the message that contains it."""


class Post(Extension):
    """Delivers parcels when it is told to."""

    name = "post"

    def start(self) -> None:
        self.parcel: Promise[str] = Promise("a parcel")

    def receive(self, message: str, sender: Proc) -> None:
        self.parcel.set_result(message)


def unpack() -> str:
    import asyncio

    post = find(Post)
    assert post is not None
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return post.parcel.future.get(timeout=30)
    if not post.parcel.future.done():
        raise NotYet("a parcel can be an argument of endpoints only", post.parcel.future)
    return post.parcel.future.get()


class OnLoop(Actor):
    @endpoint
    async def read(self, parcel: Any, large: bytearray) -> tuple[str, int]:
        return parcel, len(large)


class OnThread(Actor):
    @endpoint
    def read(self, parcel: Any, large: bytearray) -> tuple[str, int]:
        return parcel, len(large)


class Opened(Actor):
    def __init__(self, parcel: Any, large: bytearray) -> None:
        self.parcel, self.size = parcel, len(large)

    @endpoint
    async def read(self) -> tuple[str, int]:
        return self.parcel, self.size

    @endpoint
    def read_here(self) -> tuple[str, int]:
        return self.parcel, self.size


class Bystander(Actor):
    @endpoint
    async def look(self) -> str:
        return "free"


@pytest.fixture
def post() -> Iterator[Post]:
    registration = register_reducer(Parcel, lambda parcel: (unpack, ()))
    yield install(Post)
    uninstall("post")
    registration.cancel()


@pytest.mark.parametrize("cls", [OnLoop, OnThread])
def test_what_is_not_there_yet_is_waited_for_without_blocking_the_loop(post: Post, cls: type[Any]) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        reader, bystander = procs.spawn("reader", cls), procs.spawn("bystander", Bystander)
        reading = reader.read.call(Parcel(), bytearray(LARGE))
        assert bystander.look.call().get(timeout=30).values() == ["free"] * 2
        assert not reading.done()
        post.call(procs, "socks").get(timeout=30)
        assert reading.get(timeout=30).values() == [("socks", LARGE)] * 2


def test_constructors_wait_too(post: Post) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        opened = procs.spawn("opened", Opened, Parcel(), large=bytearray(LARGE))
        reading = [opened.read.call(), opened.read_here.call()]
        bystander = procs.spawn("bystander", Bystander)
        assert bystander.look.call().get(timeout=30).values() == ["free"] * 2
        assert not opened.initialized.done()
        post.call(procs, "socks").get(timeout=30)
        for each in reading:
            assert each.get(timeout=30).values() == [("socks", LARGE)] * 2


def test_a_process_that_waits_for_a_constructors_argument_can_be_stopped(post: Post) -> None:
    with this_host().spawn_procs() as procs:
        opened = procs.spawn("opened", Opened, Parcel(), bytearray(1))
        call = opened.read.call_one()
        assert procs.spawn("bystander", Bystander).look.call_one().get(timeout=30) == "free"
        procs.stop().get(timeout=30)
        with pytest.raises(Undeliverable):
            call.get(timeout=30)
