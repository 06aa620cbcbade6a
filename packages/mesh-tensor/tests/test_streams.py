"""Streams: order, what is lent, and what must not be used meanwhile."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh, this_host

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    RemoteException,
    Stream,
    StreamError,
    _stream,
    activate,
    capture,
    current_stream,
    default_stream,
    fetch,
    fetch_shard,
    load,
    rank_tensor,
    reduce,
    remote,
    save,
    share,
    show,
    slice_mesh,
    to_mesh,
    usage,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]

comm = Stream("comm")
side = Stream("side")


@pytest.fixture(scope="module")
def procs(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    """Two processes that have imported no more than these tests need."""
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="pair") as procs:
        yield procs


def lists(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor, timeout=60).values()]


@remote
def meet(x: Any, name: str, parties: int) -> Any:
    """Go on when as many streams of this process have come: the test hangs unless they run at the same time."""
    import mesh_tensor

    table = mesh_tensor.__dict__.setdefault("_test_barriers", {})
    barrier = table.setdefault(name, threading.Barrier(parties))
    if type(x) is torch.Tensor:  # and not where the forms of results are found
        barrier.wait(50)
    return x + 1


def test_what_is_made_on_a_stream_belongs_to_it(procs: ProcMesh) -> None:
    with activate(procs), comm.activate():
        made = [
            torch.ones(2),
            torch.tensor([1.0, 2.0]),
            rank_tensor(procs, "gpus"),
            torch.arange(3).view(3, 1).sum(0),
            reduce(torch.ones(2)),
        ]
        assert current_stream() is comm
        assert [each.stream for each in made] == [comm] * 5
        assert lists(made[-1]) == [[2.0, 2.0]] * 2
        with default_stream().activate():
            assert torch.ones(2).stream is default_stream()
        assert torch.ones(2).stream is comm
    with activate(procs):
        assert torch.ones(2).stream is default_stream() is current_stream()
    assert "stream='comm'" in repr(made[0])


def test_streams_run_at_the_same_time(procs: ProcMesh) -> None:
    with activate(procs):
        x = torch.zeros(2)
        borrowed, borrow = comm.borrow(x)
        with comm.activate():
            there = meet(borrowed, "both", 2)
        here = meet(x, "both", 2)
        borrow.drop()
    assert (lists(there), lists(here)) == ([[1.0, 1.0]] * 2, [[1.0, 1.0]] * 2)


def test_each_stream_keeps_its_order(procs: ProcMesh) -> None:
    with activate(procs), comm.activate():
        x = torch.zeros(4)
        y = x
        for n in range(1, 1500):
            y = y * 1.0 + n
            x += 1
        assert lists(y)[0][0] == sum(range(1, 1500))
        assert lists(x)[1] == [1499.0] * 4


def test_active_stream_is_the_threads_own(procs: ProcMesh) -> None:
    seen: list[Any] = []
    with comm.activate():
        thread = threading.Thread(target=lambda: seen.append(current_stream()))
        thread.start()
        thread.join()
    assert seen == [default_stream()]


def test_use_on_another_stream_is_refused_at_once(procs: ProcMesh) -> None:
    """OWN-1: an operator and its tensors are of the stream that is active."""
    with activate(procs):
        x = torch.ones(3)
    with comm.activate():
        y = share(torch.ones(3), procs)
        with pytest.raises(StreamError) as caught:
            x + 1
    for part in (
        "(3,) of float32",
        "default stream",
        "'comm'",
        "test_streams.py",
        "x = torch.ones(3)",
        "borrow",
    ):
        assert part in str(caught.value)
    for use in (
        lambda: y + 1,
        lambda: y + x,
        lambda: x + y,
        lambda: x.add_(y),
        lambda: reduce(y),
        lambda: torch.stack([x, y]),
        lambda: slice_mesh(y, gpus=0),
        lambda: to_mesh(y, procs.rename(gpus="ranks")),
        lambda: meet(y, "unused", 1),
        lambda: reduce([x, y]),
    ):
        with pytest.raises(StreamError, match="belongs to stream 'comm', and the default stream is active"):
            use()
    # To read a value is to wait for it.
    assert fetch_shard(y).tolist() == [1.0] * 3


def test_values_are_read_from_anywhere(procs: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    with comm.activate():
        y = share(torch.tensor(3.0), procs)
    assert (y.item(), y.tolist(), float(y)) == (3.0, 3.0, 3.0)
    show(y)
    assert "3" in capsys.readouterr().out


def test_borrow_sees_what_was_issued_before_and_the_owner_waits_at_drop(procs: ProcMesh) -> None:
    """LNE-1, HND-1: the two streams meet where the tensor goes from one to the other, and nowhere else."""
    with activate(procs):
        x = torch.zeros(1000)
        for round_ in range(20):
            for _ in range(30):
                x += 1
            borrowed, borrow = comm.borrow(x, mutable=True)
            with comm.activate():
                for _ in range(20):
                    borrowed += 1
            borrow.drop()
            x *= 1
            assert borrow.dropped
            if round_ % 7 == 0:
                assert lists(x)[0][0] == 50.0 * (round_ + 1)
    assert lists(x)[1] == [1000.0] * 1000


def test_collectives_of_two_streams_do_not_cross(procs: ProcMesh) -> None:
    with activate(procs):
        x = rank_tensor(procs, "gpus") + 1.0
        borrowed, borrow = comm.borrow(x)
        totals = []
        for n in range(1, 40):
            with comm.activate():
                totals.append((3 * n, reduce(borrowed * n)))
            totals.append((300 * n, reduce(x * 100 * n)))
        borrow.drop()
    assert [(expected, lists(total)) for expected, total in totals] == [
        (expected, [expected] * 2) for expected, _ in totals
    ]


def test_what_is_lent_to_be_read_is_not_changed(procs: ProcMesh) -> None:
    with activate(procs):
        x = torch.ones(4)
        view, apart = x[1:], x.clone()
        one, first = comm.borrow(x)
        two, second = side.borrow(view)
        assert lists(x + view.sum()) == [[4.0] * 4] * 2
        apart.add_(1)
        for change in (
            lambda: x.add_(1),
            lambda: view.mul_(2),
            x[0:1].zero_,
            lambda: torch._foreach_add_([apart, x], 1),
            lambda: torch.add(apart, 1, out=x),
            lambda: x.detach().t_(),
        ):
            with pytest.raises(
                StreamError,
                match=r"cannot be changed while it is lent to stream '(comm|side)', since .*test_streams",
            ):
                change()
        with comm.activate(), pytest.raises(StreamError, match="to be read only"):
            one.view(2, 2).add_(1)
        with pytest.raises(
            StreamError, match="cannot be lent to be changed while it is lent to stream 'comm'"
        ):
            side.borrow(x, mutable=True)
        first.drop()
        with pytest.raises(StreamError, match="while it is lent to stream 'side'"):
            x.add_(1)
        second.drop()
        x.add_(1)
    assert lists(view)[0] == [2.0] * 3
    del two


def test_what_is_lent_to_be_changed_is_not_used(procs: ProcMesh) -> None:
    with activate(procs):
        x = torch.ones(4)
        view = x.view(2, 2)
        borrowed, borrow = comm.borrow(view, mutable=True)
        for use in (
            lambda: x + 1,
            view.sum,
            lambda: fetch(x),
            lambda: show(x),
            lambda: comm.borrow(x),
        ):
            with pytest.raises(StreamError, match="cannot be used while it is lent to stream 'comm'"):
                use()
        with comm.activate():
            borrowed[0].add_(1)
            inner, further = side.borrow(borrowed)
            with pytest.raises(StreamError, match="cannot be changed while it is lent to stream 'side'"):
                borrowed.add_(1)
        with pytest.raises(
            StreamError, match=r"has lent the tensor on to stream 'side'.*drop\(\) that borrow first"
        ):
            borrow.drop()
        with side.activate():
            doubled = inner * 2
        further.drop()
        borrow.drop()
    assert lists(x)[0] == [2.0, 2.0, 1.0, 1.0]
    assert lists(doubled)[1] == [[4.0, 4.0], [2.0, 2.0]]


def test_after_the_drop_the_borrowed_tensor_is_gone(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs)
    borrowed, borrow = comm.borrow(x)
    with comm.activate():
        view = borrowed[:1]
        with borrow as entered:
            assert entered is borrow
            kept = borrowed * 3
        for each in (borrowed, view):
            with pytest.raises(
                StreamError,
                match=r"was borrowed by stream 'comm' at .*was dropped at .*with borrow as entered",
            ):
                each + 1
    with pytest.raises(StreamError, match="was dropped"):
        fetch(borrowed)
    borrow.drop()
    assert "dropped" in repr(borrow)
    assert lists(kept) == [[3.0, 3.0]] * 2


def test_a_forgotten_borrow_is_reported_and_ended(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs)

    def forget() -> Any:
        borrowed, _ = comm.borrow(x, mutable=True)
        return borrowed

    with pytest.warns(ResourceWarning, match=r"was never given back: drop\(\)"):
        borrowed = forget()
    assert lists(x + 1) == [[2.0, 2.0]] * 2
    with comm.activate(), pytest.raises(StreamError, match="was forgotten"):
        borrowed + 1


def test_a_lent_tensor_outlives_its_names(procs: ProcMesh) -> None:
    gc.collect()
    before = [each.tensors for each in usage(procs).values()]
    x = share(torch.full((1000,), 2.0), procs)
    borrowed, borrow = comm.borrow(x)
    assert [each.tensors for each in usage(procs).values()] == [each + 2 for each in before]
    del x
    with activate(procs):
        junk = [torch.zeros(1000) for _ in range(20)]
    with comm.activate():
        total = borrowed.sum()
    borrow.drop()
    assert lists(total) == [2000.0] * 2
    del borrowed, total, junk, borrow
    gc.collect()
    assert [each.tensors for each in usage(procs).values()] == before


def test_memory_that_streams_share_counts_once(procs: ProcMesh) -> None:
    x = share(torch.zeros(1000), procs)
    (before, _) = usage(procs).values()
    borrowed, borrow = comm.borrow(x)
    (after, _) = usage(procs).values()
    assert (after.tensors, after.nbytes) == (before.tensors + 1, before.nbytes)
    borrow.drop()
    del borrowed


def test_what_cannot_be_borrowed(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs)
    with pytest.raises(StreamError, match="belongs to the default stream already"):
        default_stream().borrow(x)
    with pytest.raises(TypeError, match="in this process"):
        comm.borrow(torch.ones(2))
    with pytest.raises(StreamError, match="do not flow through changes"):
        comm.borrow(x.clone().requires_grad_(), mutable=True)
    with pytest.raises(TypeError, match="must be a text"):
        Stream("")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(comm)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.deepcopy(comm)


def test_failures_cross_with_their_line(procs: ProcMesh) -> None:
    with activate(procs):
        x = torch.ones(2, 2)
        broken = x[torch.tensor([7])]  # the line at fault
    borrowed, borrow = comm.borrow(broken)
    other, second = comm.borrow(x)
    with comm.activate():
        sum_ = borrowed + other
        good = other + 1
    for each in (sum_, borrowed):
        with pytest.raises(RemoteException, match=r"(?s)index 7 is out of bounds.*the line at fault"):
            fetch(each)
    assert lists(good)[0] == [[2.0, 2.0]] * 2
    borrow.drop()
    second.drop()
    assert lists(x)[0] == [[1.0, 1.0]] * 2


def test_failed_change_of_a_borrower_reaches_the_owner(procs: ProcMesh) -> None:
    x = share(torch.zeros(2, 2), procs)
    borrowed, borrow = comm.borrow(x, mutable=True)
    with comm.activate():
        place, added = share(torch.tensor([9]), procs), share(torch.ones(1, 2), procs)
        borrowed.index_add_(0, place, added)  # the change at fault
    borrow.drop()
    with pytest.raises(RemoteException, match=r"(?s)the change at fault"):
        fetch(x + 1)


def test_gradients_flow_through_a_borrow(procs: ProcMesh) -> None:
    with activate(procs):
        weight = torch.full((3,), 2.0, requires_grad=True)
        scaled = weight * rank_tensor(procs, "gpus")
        borrowed, one = comm.borrow(scaled)
        with comm.activate():
            total = reduce(borrowed * borrowed)
        back, two = default_stream().borrow(total)
        (back.sum() + weight.sum()).backward()
        two.drop()
        one.drop()
    # On the process of rank 1: 2 * weight * rank, in the sums of both processes.
    assert lists(weight.grad) == [[1.0] * 3, [9.0] * 3]


def test_what_one_stream_gives_is_sent_with_what_the_other_one_takes(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STM-7."""
    with activate(procs):
        x = torch.ones(2)
        lent, borrow = comm.borrow(x)
        borrow.drop()
        fetch(x)
        # From here on nothing is sent because time has passed.
        monkeypatch.setattr(_stream, "_PACE", float("inf"))
        monkeypatch.setattr(_stream.Flusher, "wake", lambda *_: None)
        sent: list[Any] = []
        send = _stream.Stream.send
        monkeypatch.setattr(
            _stream.Stream, "send", lambda self, messages: (sent.append(self), send(self, messages))
        )
        for _ in range(3):
            lent, borrow = comm.borrow(x, mutable=True)
            with comm.activate():
                lent.add_(1)
            borrow.drop()
        streams = {lent.descriptor.stream, x.descriptor.stream}
        assert fetch_shard(x, timeout=60).tolist() == [4.0, 4.0]
        assert set(sent) == streams
        # What waited was sent whole, at both.
        assert not any(each.holds_back() for each in streams)


def test_a_part_of_the_mesh_has_streams_too(procs: ProcMesh) -> None:
    with activate(procs), comm.activate():
        x = rank_tensor(procs, "gpus") + 5.0
        for _ in range(3):
            part = slice_mesh(x, gpus=slice(1, 2))
            x = x + 1
    assert part.stream is comm
    assert [each.tolist() for each in fetch(part).values()] == [8.0]
    with pytest.raises(StreamError):
        part + 1


def test_steps_are_captured_on_one_stream(procs: ProcMesh) -> None:
    @capture
    def step(x: Any) -> Any:
        return (x * 2).sum()

    @capture
    def crossing(x: Any) -> Any:
        borrowed, borrow = comm.borrow(x)
        with borrow, comm.activate():
            return reduce(borrowed)

    @capture
    def two_streams(x: Any) -> Any:
        with comm.activate(), activate(procs):
            torch.ones(2)
        return x + 1

    with activate(procs):
        for n in range(4):
            x = torch.full((3,), float(n))
            assert lists(step(x)) == [6.0 * n] * 2
            borrowed, borrow = comm.borrow(x, mutable=True)
            with comm.activate():
                assert lists(step(borrowed)) == [6.0 * n] * 2
                assert step(borrowed).stream is comm
            with pytest.raises(StreamError, match="cannot be used while it is lent"):
                step(x)
            borrow.drop()
        with pytest.raises(Exception, match="a captured step cannot borrow a tensor"):
            crossing(x)
        with pytest.raises(Exception, match="a captured step runs on one stream"):
            two_streams(x)
    assert step.replays > 0


def test_replay_is_refused_while_what_it_uses_is_lent(procs: ProcMesh) -> None:
    weight = share(torch.ones(2), procs)

    @capture
    def step(x: Any) -> Any:
        return x * weight

    x = share(torch.ones(2), procs)
    for _ in range(3):
        step(x)
    borrowed, borrow = comm.borrow(weight)
    with pytest.raises(StreamError, match=r"(?s)uses a tensor.*lent to stream 'comm'"):
        step(x)
    borrow.drop()
    assert lists(step(x)) == [[1.0, 1.0]] * 2
    del borrowed


def test_tensors_of_streams_are_saved_and_loaded(procs: ProcMesh, tmp_path: Any) -> None:
    with activate(procs):
        here = torch.ones(2)
        with comm.activate():
            there = torch.full((2,), 3.0)
    save({"here": here, "there": there}, tmp_path / "saved").get(timeout=60)
    here.zero_()
    with comm.activate():
        there.zero_()
    load({"here": here, "there": there}, tmp_path / "saved")
    assert (lists(here)[0], lists(there)[1]) == ([1.0, 1.0], [3.0, 3.0])


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_give_what_one_process_gives(procs: ProcMesh, seed: int) -> None:
    """Operators, views and changes in place on three streams, with borrows where tensors are used elsewhere."""
    draw = random.Random(seed)
    streams = [default_stream(), comm, side]
    with activate(procs):
        there: list[Any] = [torch.full((4,), float(n)) for n in range(3)]
    here = [torch.full((4,), float(n)) for n in range(3)]
    for _ in range(60):
        stream, kind = draw.choice(streams), draw.choice(["add", "mul", "view", "change", "reduce"])
        a, b = draw.randrange(len(there)), draw.randrange(len(there))
        borrows = []

        def mine(at: int, mutable: bool = False, stream: Any = stream, borrows: Any = borrows) -> Any:
            if there[at].stream is stream:
                return there[at]
            borrowed, borrow = stream.borrow(there[at], mutable=mutable)
            borrows.append(borrow)
            return borrowed

        x = mine(a, mutable=kind == "change")
        with stream.activate():
            if kind == "change":
                x.mul_(0.5).add_(1)
                here[a].mul_(0.5).add_(1)
            elif kind == "view":
                if there[a].stream is stream:
                    there.append(x[:])
                    here.append(here[a][:])
            elif kind == "reduce":
                there.append(reduce(x, op="avg"))
                here.append(here[a].clone())
            else:
                y = x if a == b else mine(b)
                there.append((x + y if kind == "add" else x * y).clamp(-9, 9))
                here.append((here[a] + here[b] if kind == "add" else here[a] * here[b]).clamp(-9, 9))
        for borrow in borrows:
            borrow.drop()
    for mesh, plain in zip(there, here, strict=True):
        for value in fetch(mesh, timeout=60).values():
            torch.testing.assert_close(value, plain)
