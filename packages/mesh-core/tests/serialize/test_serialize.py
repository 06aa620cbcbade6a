"""Messages to bytes and back: what is sent beside the stream, what is preserved, what errors say."""

from __future__ import annotations

import collections
import dataclasses
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from typing import Any, NamedTuple

import pytest

from mesh_core._common.errors import MeshError, SerializationError
from mesh_core._serialize import OUT_OF_BAND_BYTES, dumps, loads

pytestmark = [pytest.mark.beside, pytest.mark.python, pytest.mark.versions]

LARGE = 100_000


def arrive(obj: object) -> Any:
    """Send ``obj`` as the runtime does: the buffers arrive as the receiver's own writable memory."""
    data, buffers = dumps(obj)
    return loads(data, [bytearray(buffer) for buffer in buffers])


@dataclasses.dataclass
class Batch:
    name: str
    payload: Any


class Pair(NamedTuple):
    left: Any
    right: Any


class Unloadable:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


# --- the plain road ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        1.5,
        "text \N{SNOWMAN} \ud800",
        b"bytes",
        (),
        ((1,), {}),
        (("a", 2.0, None), {"k": True}),
        (([1, [2, [3, {"x": {4}}]]], (1, (2,))), {"d": {"e": {"f": b"g"}}}),
        list(range(1000)),
        {1: "a", None: [frozenset({1})]},
        (1, {}),
        ((), {}, ()),
        range(5),
        Batch("b", [1, 2]),
        Pair(1, Pair(2, None)),
        collections.OrderedDict(a=1),
        complex(1, 2),
        int,
        textwrap.dedent,
    ],
)
def test_a_value_arrives_equal_and_of_its_own_type(value: object) -> None:
    result = arrive(value)
    assert result == value
    assert type(result) is type(value)


def test_a_small_call_is_pickled_by_plain_c_pickle() -> None:
    call = ((1, "two", b"3", [4.0]), {"five": {"six": None}})
    assert dumps(call) == (pickle.dumps(call, 5), [])


def test_a_message_without_buffers_is_read_by_plain_pickle() -> None:
    data, buffers = dumps([Batch("b", {1, 2}), lambda x: x + 1])
    assert buffers == []
    batch, function = pickle.loads(data)
    assert batch == Batch("b", {1, 2})
    assert function(2) == 3


def test_plain_messages_do_not_import_cloudpickle() -> None:
    code = """
        import sys
        from mesh_core._serialize import dumps
        dumps((("text", [1], b"x"), {"a": 1}))
        dumps((range(3), bytearray(100_000), memoryview(b"x"), ValueError))
        assert "cloudpickle" not in sys.modules
        assert "numpy" not in sys.modules and "torch" not in sys.modules
        dumps(lambda: 0)
        assert "cloudpickle" in sys.modules
    """
    assert run(code) == b""


# --- out of band --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("size", [0, 1, 255, 256, OUT_OF_BAND_BYTES, 65535, 65536, 65537, 1_000_000])
def test_bytes_of_every_size_arrive_unchanged(kind: Any, size: int) -> None:
    value = kind(i % 251 for i in range(size))
    result = arrive([value, "after", value])
    assert result == [value, "after", value]
    assert type(result[0]) is kind
    assert result[0] is result[2]  # SER-1


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_travel_beside_the_stream_from_64_kib_on(kind: Any) -> None:
    assert dumps([kind(65535)])[1] == []
    (buffer,) = dumps([kind(65536)])[1]
    assert buffer.nbytes == 65536


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_large_bytes_are_not_copied(kind: Any) -> None:
    """SER-3."""
    owner = bytearray(LARGE)
    value = owner if kind is bytearray else kind(owner)
    data, buffers = dumps({"deep": [Batch("b", (value,))]})
    assert len(data) < 500
    assert [buffer.nbytes for buffer in buffers] == [LARGE]
    if kind is memoryview:
        owner[0] = 77
        assert buffers[0][0] == 77
    else:
        assert buffers[0].obj is value
    assert (buffers[0].ndim, buffers[0].format, buffers[0].contiguous) == (1, "B", True)


def test_buffers_of_all_kinds_keep_their_order() -> None:
    value = [
        b"a" * LARGE,
        memoryview(b"b" * LARGE),
        "c" * LARGE,
        bytearray(b"d" * LARGE),
        list(range(50_000)),
        b"e" * LARGE,
        "\ud800" * LARGE,
        pickle.PickleBuffer(bytearray(b"f" * LARGE)),
    ]
    *result, last = arrive(value)
    assert result == value[:-1]
    assert bytes(last) == b"f" * LARGE


def test_a_frame_that_ends_like_a_header_is_not_mistaken_for_one() -> None:
    # A float whose encoding ends like the header of 65,536 bytes, at every position near the end of a frame.
    import struct

    header = b"B" + (65536).to_bytes(4, "little")
    trap = struct.unpack(">d", b"\x3f\xf0\x00" + header)[0]
    for lead in range(9):
        value: list[Any] = ["x" * lead, *[trap] * 15_000, b"y" * 65536, trap, bytearray(65536)]
        assert arrive(value) == value


def test_views_travel_beside_the_stream_from_16_kib_on() -> None:
    assert OUT_OF_BAND_BYTES == 16 * 1024
    for wrap in (memoryview, pickle.PickleBuffer):
        assert dumps([wrap(bytearray(16 * 1024 - 1))])[1] == []
        (buffer,) = dumps([wrap(bytearray(16 * 1024))])[1]
        assert buffer.nbytes == 16 * 1024


def test_memoryviews_arrive_as_memoryviews() -> None:
    for size in (64, 80_000):
        writable = memoryview(bytearray(range(64)) * (size // 64))
        for view in (
            writable,
            writable.toreadonly(),
            writable.cast("d"),
            writable.cast("I", (4, size // 16)),
            writable[::2],
            writable.cast("c"),
            writable[:0],
        ):
            result = arrive(view)
            assert isinstance(result, memoryview)
            assert result == view
            assert (result.format, result.shape, result.readonly) == (view.format, view.shape, view.readonly)


def test_a_result_outlives_the_message_and_is_writable() -> None:
    """SER-2."""

    class Part(bytearray):
        pass

    data, buffers = dumps(memoryview(bytearray(LARGE)))
    part = Part(buffers[0])
    alive = weakref.ref(part)
    result: Any = loads(data, [part])
    del part
    gc.collect()
    assert alive() is not None
    result[5] = 7
    assert result[5] == 7
    del result
    gc.collect()
    assert alive() is None


def test_one_object_stays_one_object() -> None:
    """SER-1, for each way."""
    for shared in (
        ["list"],
        bytearray(10),
        bytearray(LARGE),
        Batch("b", 1),
        memoryview(bytearray(LARGE)),
        lambda: 0,
    ):
        first, second = arrive([shared, {"again": shared}])
        assert first is second["again"]


def test_a_buffer_that_is_lost_is_an_error() -> None:
    data, _ = dumps(bytearray(LARGE))
    with pytest.raises(SerializationError, match="cannot rebuild a message"):
        loads(data, [])


@pytest.mark.full
@pytest.mark.once
@pytest.mark.slow
def test_three_gibibytes() -> None:
    size = 3 << 30
    try:
        value = bytearray(size)
    except MemoryError:
        pytest.skip("this machine has no 3 GiB to spare")
    data, buffers = dumps(((value,), {}))
    assert len(data) < 100
    assert [buffer.nbytes for buffer in buffers] == [size]
    data, buffers = dumps(((memoryview(value),), {}))
    value[-1] = 9
    ((view,), _) = loads(data, buffers)
    assert (view.nbytes, view[-1]) == (size, 9)
    view.release()


# --- numpy --------------------------------------------------------------------------------------------------


def arrays() -> list[Any]:
    np = pytest.importorskip("numpy", reason="numpy is not installed: mesh-core does without")
    big = np.arange(120_000, dtype="f8").reshape(300, 400)
    record = np.dtype([("x", "i4"), ("y", "f8", (2,))])
    return [
        big,
        np.asfortranarray(big),
        big.T,
        big[::2, ::-3],
        big[5],
        np.arange(5, dtype=">i2"),
        np.array(3, dtype="f4"),
        np.zeros((0, 4)),
        np.zeros((0, 4), dtype="c16"),
        np.ones(20_000, dtype=record),
        np.ones(3, dtype=record),
        np.array(["a", "bc"] * 9000),
        np.arange("2020-01-01", "2020-01-09", dtype="M8[D]"),
        np.ones((10, 20, 30, 4)).transpose(3, 0, 2, 1),
        np.array([b"x"] * 10, dtype="S5"),
        np.zeros(40_000, dtype=bool),
        np.array([1, "two", None], dtype=object),
        np.ma.masked_array([1, 2], [True, False]),
    ]


@pytest.mark.parametrize("place", range(18))
def test_arrays_arrive_equal_and_writable(place: int) -> None:
    """SER-2."""
    np = pytest.importorskip("numpy", reason="numpy is not installed: mesh-core does without")
    array = arrays()[place]
    for sent in (array, read_only(array)):
        result = arrive(sent)
        assert type(result) is type(array)
        assert result.dtype == array.dtype
        assert result.shape == array.shape
        assert np.array_equal(result, array)
        assert result.flags.writeable


def read_only(array: Any) -> Any:
    array = array[...]
    array.flags.writeable = False
    return array


def test_large_arrays_are_not_copied() -> None:
    """SER-3."""
    np = pytest.importorskip("numpy", reason="numpy is not installed: mesh-core does without")
    big = np.arange(120_000, dtype="f8").reshape(300, 400)
    for array in (big, big.T, big[10:20, :], np.asfortranarray(big)[:, 3:], read_only(big)):
        data, buffers = dumps(Batch("b", {"a": [array]}))
        assert len(data) < 600
        assert [buffer.nbytes for buffer in buffers] == [array.nbytes]
        seen = np.frombuffer(buffers[0], dtype="f8")
        assert np.shares_memory(seen, array)


def test_a_strided_view_sends_its_elements_only() -> None:
    np = pytest.importorskip("numpy", reason="numpy is not installed: mesh-core does without")
    _, buffers = dumps(np.zeros((1000, 1000))[:, ::10])
    assert [buffer.nbytes for buffer in buffers] == [1000 * 100 * 8]


def test_an_array_that_occurs_twice_is_sent_once() -> None:
    """SER-1."""
    np = pytest.importorskip("numpy", reason="numpy is not installed: mesh-core does without")
    for array in (np.zeros(LARGE), np.zeros(3)):
        data, buffers = dumps([array, array])
        assert len(buffers) <= 1
        first, second = loads(data, [bytearray(buffer) for buffer in buffers])
        assert first is second


# --- by value -----------------------------------------------------------------------------------------------


def run(code: str, *, stdin: bytes = b"") -> bytes:
    """Run a separate script with its own ``__main__``, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], input=stdin, capture_output=True, timeout=50
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_functions_without_a_module_are_sent_by_value() -> None:
    offset = 10

    def add(x: int) -> int:
        return x + offset

    result = arrive({"f": add, "g": lambda x: x * 2})
    assert (result["f"](1), result["g"](2)) == (11, 4)
    assert arrive(textwrap.dedent) is textwrap.dedent


def test_code_sent_by_value_keeps_its_file_and_line() -> None:
    """Tracebacks, debuggers and `inspect.getsource` need them to find the source; cloudpickle 3.1.3 omits the file."""

    def outer() -> Any:
        return lambda: None

    arrived = arrive(outer)
    for here, there in ((outer, arrived), (outer(), arrived())):
        for place in ("co_filename", "co_firstlineno", "co_qualname"):
            assert getattr(there.__code__, place) == getattr(here.__code__, place)


SCRIPT = """
    import dataclasses, enum, pickle, sys
    from mesh_core._serialize import dumps, loads

    STEP = 5

    @dataclasses.dataclass
    class Job:
        size: int
        seen: "list" = dataclasses.field(default_factory=list)

        def next(self):
            return self.size + STEP

    class Colour(enum.Enum):
        RED = 1

    class Trainer:
        count = 0

        def work(self, job):
            assert isinstance(job, Job)
            type(self).count += 1
            return Job(job.next())

    def helper(job):
        return Trainer().work(job)

    def messages():
        return [dumps(((Trainer, helper, Job(1), Colour.RED, bytearray(100_000)), {})) for _ in range(2)]

    if sys.argv[1:] == []:
        sys.stdout.buffer.write(pickle.dumps([(data, list(map(bytes, buffers))) for data, buffers in messages()]))
"""

WORKER = """
    import pickle, sys
    from mesh_core._serialize import dumps, loads

    class Job: "Something else by the same name."

    first, second = [loads(*message)[0] for message in pickle.load(sys.stdin.buffer)]
    (Trainer, helper, job, colour, blob), (Trainer2, helper2, job2, colour2, _) = first, second
    assert Trainer is Trainer2 and type(job) is type(job2) is not Job and colour is colour2
    assert isinstance(Trainer(), Trainer2) and len(blob) == 100_000
    assert Trainer().work(job).size == 6 and Trainer2().work(job2).size == 6
    assert Trainer.count == 2
    assert helper(job) == helper2(job2)
    assert colour.name == "RED"
    sys.stdout.buffer.write(b"fine")
"""


def test_classes_of_main_are_one_class_over_two_messages() -> None:
    """SER-4."""
    assert run(WORKER, stdin=run(SCRIPT)) == b"fine"


def test_a_class_keeps_what_a_worker_set_on_it() -> None:
    counted = WORKER.replace(
        "first, second = [loads(*message)[0] for message in pickle.load(sys.stdin.buffer)]",
        "m1, m2 = pickle.load(sys.stdin.buffer); first = loads(*m1)[0]; first[0].count = 0\n"
        "    first[0].mark = 'kept'; second = loads(*m2)[0]; assert second[0].mark == 'kept'",
    )
    assert run(counted, stdin=run(SCRIPT)) == b"fine"


def test_a_class_that_returns_is_the_scripts_own_and_unchanged() -> None:
    code = textwrap.dedent(SCRIPT.replace("sys.argv[1:] == []", "False")) + textwrap.dedent("""
        method = Job.next
        data, buffers = dumps(Job(1))
        back = loads(data, buffers)
        assert type(back) is Job and back == Job(1)
        assert Job.next is method
        STEP = 100
        assert back.next() == 101
    """)
    assert run(code) == b""


def test_a_registered_module_is_sent_by_value(tmp_path: Any, monkeypatch: Any) -> None:
    import cloudpickle

    (tmp_path / "only_here.py").write_text("class Thing:\n    value = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    cloudpickle.register_pickle_by_value(only_here)
    try:
        data, _ = dumps(((only_here.Thing(),), {}))
    finally:
        cloudpickle.unregister_pickle_by_value(only_here)
        sys.modules.pop("only_here")
    code = "import sys; from mesh_core._serialize import loads; print(loads(sys.stdin.buffer.read())[0][0].value)"
    assert run(code, stdin=data).strip() == b"4"


# --- errors -------------------------------------------------------------------------------------------------


def closure_over(value: object) -> Any:
    return lambda: value


class Holder:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (((threading.Lock(),), {}), "args[0]"),
        (((1, {"lock": threading.Lock()}), {}), "args[1]['lock']"),
        (((), {"job": [0, Batch("b", (threading.Lock(),))]}), "kwargs['job'][1].payload[0]"),
        (((Holder(inner=Holder(lock=threading.Lock())),), {}), "args[0].inner.lock"),
        (((Pair(1, threading.Lock()),), {}), "args[0].right"),
        (((closure_over(threading.Lock()),), {}), "args[0] (its closure's 'value')"),
        ((b"class", "trainers", (1, None), (1, threading.Lock()), {}), "args[1]"),
        (threading.Lock(), "the message"),
        ([(i for i in "")], "the message[0]"),
    ],
)
def test_what_cannot_be_sent_is_named(value: object, path: str) -> None:
    with pytest.raises(SerializationError) as caught:
        dumps(value)
    error = caught.value
    assert error.path == path
    assert str(error).startswith(f"cannot send {path}: cannot pickle ")
    assert error.type_name in ("_thread.lock", "generator")
    assert "send what it is made from" in str(error)
    assert isinstance(error, TypeError)
    assert isinstance(error, MeshError)


def test_a_part_is_named_down_to_the_sixteenth_level() -> None:
    def path(depth: int) -> str:
        value: Any = threading.Lock()
        for _ in range(depth):
            value = [value]
        with pytest.raises(SerializationError) as caught:
            dumps(value, root="it")
        return caught.value.path

    assert path(16) == "it" + "[0]" * 16
    assert path(17) == "it" + "[0]" * 16


def test_the_search_ends_after_256_parts() -> None:
    for before, path in ((255, "it[255]"), (256, "it")):
        with pytest.raises(SerializationError) as caught:
            dumps([*range(before), threading.Lock()], root="it")
        assert caught.value.path == path


def test_long_keys_are_cut_in_paths() -> None:
    for key, shown in (("x" * 38, repr("x" * 38)), ("x" * 39, "'" + "x" * 36 + "...")):
        with pytest.raises(SerializationError) as caught:
            dumps({key: threading.Lock()}, root="it")
        assert caught.value.path == f"it[{shown}]"


def test_the_caller_says_what_the_root_is_called() -> None:
    with pytest.raises(SerializationError) as caught:
        dumps({"a": threading.Lock()}, root="the result of 'step'")
    assert caught.value.path == "the result of 'step'['a']"


def test_endless_nesting_is_an_error() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(SerializationError, match="nested too deeply"):
        dumps(value)
    while value:
        value = value[0]


def test_an_object_whose_own_methods_raise_is_named() -> None:
    class Broken:
        def __getstate__(self) -> Any:
            raise ValueError("no state today")

    with pytest.raises(SerializationError, match=r"cannot send args\[0\]: ValueError: no state today"):
        dumps(((Broken(),), {}))


def test_what_cannot_be_rebuilt_says_why() -> None:
    data, _ = dumps([Unloadable()])
    with pytest.raises(SerializationError, match="invalid literal"):
        loads(data)
    with pytest.raises(SerializationError, match="'not_installed_anywhere' must be importable"):
        loads(b"\x80\x05cnot_installed_anywhere\nThing\n.")


def test_an_interrupt_is_not_turned_into_an_error() -> None:
    class Interrupted:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dumps([Interrupted()])


def test_a_memoryview_that_cannot_be_rebuilt_is_refused() -> None:
    np = pytest.importorskip("numpy", reason="numpy is not installed: mesh-core does without")
    with pytest.raises(SerializationError, match="memoryview of format 'Zd'"):
        dumps(memoryview(np.zeros(4, dtype="c16")))


class Lazy(types.ModuleType):
    """Like torch.ops: a module with its own class, which creates missing attributes on demand."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        space = Lazy(f"{self.__name__}.{name}")
        setattr(self, name, space)
        return space


def test_modules_with_their_own_class_are_sent_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = Lazy("made_up.ops")
    monkeypatch.setitem(sys.modules, "made_up.ops", ops)
    assert arrive(ops) is ops
    assert arrive({"space": ops.aten})["space"] is ops.aten
    renamed = Lazy("another name")
    monkeypatch.setitem(sys.modules, "made_up.renamed", renamed)
    assert arrive(renamed) is renamed

    def uses(value: int) -> Any:
        return ops.aten, value

    uses.__module__ = "__main__"
    assert arrive(uses)(1) == (ops.aten, 1)


def test_a_module_that_cannot_be_named_is_refused() -> None:
    with pytest.raises(SerializationError, match="Lazy"):
        dumps(Lazy("nowhere"))


def test_garbage_of_a_message_that_could_not_be_sent_is_collected() -> None:
    code = textwrap.dedent(
        """
        import gc, threading
        from mesh_core._serialize import dumps
        for _ in range(5):
            try:
                dumps(((memoryview(bytearray(100_000)), threading.Lock()), {}))
            except TypeError as error:
                print(error)
            gc.collect()
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("cannot send args[1]: cannot pickle '_thread.lock' object") == 5
