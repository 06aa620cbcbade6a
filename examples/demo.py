"""Train a small network on four processes of this machine, kill one of them, and go on: a policy makes it again.

Run it with `./dev demo`, or, where mesh-core, mesh-supervision and numpy are installed, with `python examples/demo.py`.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time

import numpy as np
import numpy.typing as npt

from mesh_core import (
    Actor,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    current_rank,
    endpoint,
    this_host,
)
from mesh_supervision import Ignore, OneForOne

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

WORKERS = 4
STEPS = 600
KILL_AT = 240
SLOW_DOWN_AT = 480
ARMS, PER_ARM, HIDDEN = 3, 1_000, 64


def spirals(seed: int) -> tuple[Array, Labels]:
    """Points on three entangled spiral arms; no straight line tells them apart."""
    rng = np.random.default_rng(seed)
    arm = np.repeat(np.arange(ARMS), PER_ARM)
    radius = rng.uniform(0.1, 1.0, arm.size)
    angle = arm * 2 * np.pi / ARMS + radius * 4.5 + rng.normal(0.0, 0.12, arm.size)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    order = rng.permutation(arm.size)
    return points[order], arm[order]


class Trainer(Actor):
    """One replica of the network, which sees its share of the data."""

    def __init__(self, rate: float) -> None:
        rng = np.random.default_rng(0)  # the same weights everywhere
        self.rate = rate
        self.weights = [rng.normal(0, 1, (2, HIDDEN)), np.zeros(HIDDEN)]
        self.weights += [rng.normal(0, HIDDEN**-0.5, (HIDDEN, ARMS)), np.zeros(ARMS)]
        self.speed = [np.zeros_like(w) for w in self.weights]
        me = current_rank()
        share = slice(me.rank, None, me.extent.nelements)
        points, labels = spirals(seed=1)
        self.points, self.labels = points[share], labels[share]

    @endpoint
    def state(self) -> tuple[float, list[Array], list[Array]]:
        """What a replica needs to be equal to this one."""
        return self.rate, self.weights, self.speed

    @endpoint(on_restart="wait")
    def catch_up(self, rate: float, weights: list[Array], speed: list[Array]) -> None:
        """Be equal to another replica. Called of one that has died, this waits until it was made again."""
        self.rate = rate
        self.weights = [each.copy() for each in weights]
        self.speed = [each.copy() for each in speed]

    def forward(self, points: Array) -> tuple[Array, Array]:
        w1, b1, w2, b2 = self.weights
        hidden = np.maximum(points @ w1 + b1, 0.0)
        scores = hidden @ w2 + b2
        likely = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, likely / likely.sum(axis=1, keepdims=True)

    @endpoint
    def gradient(self) -> tuple[float, list[Array]]:
        """The loss on this rank's share, and where it falls."""
        rows = np.arange(len(self.labels))
        hidden, error = self.forward(self.points)
        loss = -float(np.log(error[rows, self.labels]).mean())
        error[rows, self.labels] -= 1.0
        error /= len(rows)
        back = (error @ self.weights[2].T) * (hidden > 0)
        return loss, [self.points.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]

    @endpoint
    def apply(self, gradients: list[Array]) -> None:
        """Take a step; every rank takes the same, so that all replicas stay equal."""
        for weight, speed, gradient in zip(self.weights, self.speed, gradients, strict=True):
            speed[...] = 0.9 * speed - self.rate * gradient
            weight[...] += speed

    @endpoint
    def set_rate(self, rate: float) -> None:
        self.rate = rate

    @endpoint
    def accuracy(self) -> float:
        """How many points it has never seen are told apart."""
        points, labels = spirals(seed=2)
        return float((self.forward(points)[1].argmax(axis=1) == labels).mean())

    @endpoint
    def checksum(self) -> float:
        return float(sum(np.abs(w).sum() for w in self.weights))


def picture(procs: ProcMesh, pids: list[int | None], actor: str, dead: MeshFailure | None = None) -> str:
    """The host as a frame, its processes as boxes, and what lives in each of them."""
    boxes = []
    for place, ((point, _), pid) in enumerate(zip(procs, pids, strict=True)):
        where = ", ".join(f"{label}={at}" for label, at in point.items())
        gone = dead is not None and dead.rank == place
        state = f"x killed ({signal.Signals(dead.signal).name})" if dead and gone and dead.signal else "o up"
        rows = [f"pid {pid}", "-" if gone else actor, state]
        width = max(len(row) for row in [where, *rows]) + 2
        box = [f"┌ {where} {'─' * (width - len(where) - 2)}┐"]
        box += [f"│ {row:<{width - 1}}│" for row in rows]
        boxes.append([*box, f"└{'─' * width}┘"])
    lines = [" ".join(parts) for parts in zip(*boxes, strict=True)]
    title = f"host {platform.node()}"
    text = "\n".join([f"  {title}", *(f"  {line}" for line in lines)])
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        text = text.translate(str.maketrans("┌┐└┘│─", "++++|-"))
    return text


def show_progress(step: int, loss: float, ranks: int) -> None:
    """One line that changes on a terminal; a line now and then elsewhere."""
    done = 24 * step // STEPS
    line = f"  step {step:3}/{STEPS} [{'#' * done}{'.' * (24 - done)}] loss {loss:.4f} on {ranks} ranks"
    if sys.stdout.isatty():
        last = step in {KILL_AT - 1, SLOW_DOWN_AT - 1, STEPS}
        print(f"\r{line}", end="\n" if last else "", flush=True)
    elif step % 60 == 0:
        print(line, flush=True)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def main() -> None:
    started = time.perf_counter()
    say(f"spawning {WORKERS} processes, and a trainer on each")
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # The policy is the trainers': it makes their processes again too.
    with this_host().spawn_procs(
        {"workers": WORKERS}, supervise=Ignore(), env=one_thread, preload=["numpy"]
    ) as procs:
        one_for_one = OneForOne(intensity=3, period=60.0)
        trainers = procs.spawn("trainers", Trainer, 0.1, supervise=one_for_one)
        trainers.initialized.get(timeout=30)
        pids = procs.pids
        print(picture(procs, pids, "trainers"))

        say("training: gradients come from a call to all, their mean goes back by a broadcast")
        for step in range(1, STEPS + 1):
            if step == KILL_AT:
                say(f"killing pid {pids[-1]} with SIGKILL")
                os.kill(pids[-1] or 0, signal.SIGKILL)
            if step == SLOW_DOWN_AT:
                say("a broadcast: smaller steps from here on")
                trainers.set_rate.broadcast(0.02)
            try:
                replies: ValueMesh[tuple[float, list[Array]]] = trainers.gradient.call().get(timeout=30)
            except SupervisionError as error:
                dead = error.failure
                assert dead is not None
                print("  caught:", dead.report().replace("\n", "\n  "))
                print(picture(procs, pids, "trainers", dead))
                say(f"the policy OneForOne makes rank {dead.rank} again, and rank 0 hands it the weights")
                state = trainers.slice(workers=0).state.call_one().get(timeout=30)
                trainers.slice(workers=dead.rank or 0).catch_up.call_one(*state).get(timeout=30)
                pids = procs.pids
                print(picture(procs, pids, "trainers"))
                replies = trainers.gradient.call().get(timeout=30)
            losses, gradients = zip(*replies.values(), strict=True)
            trainers.apply.broadcast([np.mean(parts, axis=0) for parts in zip(*gradients, strict=True)])
            show_progress(step, float(np.mean(losses)), len(replies))

        say("a slice of one, asked about points that nobody has trained on")
        print(f"  accuracy of rank 0: {trainers.slice(workers=0).accuracy.call_one().get(timeout=30):.1%}")
        sums = trainers.checksum.call().get(timeout=30).values()
        print(f"  replicas equal: {'yes' if len(set(sums)) == 1 else f'no: {sums}'}")
    say(f"done in {time.perf_counter() - started:.1f} s; every process has ended")


if __name__ == "__main__":
    main()
