"""Batch inference as a pipeline: shards are read in batches of rows, these are parsed, a model scores them, and results are written.

Each stage has actors of its own, and each item goes to whichever is free. No stage runs away from the next: what is under way is
bounded in bytes. A batch with a row that cannot be parsed is set aside, and the slowest stage is named at the end.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mesh_core import Actor, Pipeline, Stage, endpoint, this_host

SHARDS, ROWS, BATCH = 6, 40, 8


class Reader(Actor):
    @endpoint
    def read(self, shard: str) -> Iterator[list[str]]:
        """A shard's lines, some at a time."""
        lines = Path(shard).read_text().splitlines()
        for start in range(0, len(lines), BATCH):
            yield lines[start : start + BATCH]

    @endpoint
    def parse(self, lines: list[str]) -> list[float]:
        """A batch of rows."""
        return [float(json.loads(line)["x"]) for line in lines]


class Model(Actor):
    def __init__(self) -> None:
        self.weight, self.bias = 2.0, 1.0

    @endpoint
    def infer(self, batch: list[float]) -> list[float]:
        """What a network would make of a batch."""
        for _ in range(20_000):  # it takes its time
            pass
        return [self.weight * x + self.bias for x in batch]


class Writer(Actor):
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.files = 0

    @endpoint
    def write(self, scores: list[float]) -> int:
        """Write a file; return how many scores it has."""
        self.files += 1
        (self.folder / f"scores-{os.getpid()}-{self.files}.json").write_text(json.dumps(scores))
        return len(scores)


def make_shards(folder: Path) -> list[str]:
    """Files of rows, of which one is broken."""
    paths = []
    for shard in range(SHARDS):
        rows = [json.dumps({"x": shard * ROWS + row}) for row in range(ROWS)]
        if shard == 2:
            rows[13] = '{"x": '
        path = folder / f"shard-{shard}.jsonl"
        path.write_text("\n".join(rows) + "\n")
        paths.append(str(path))
    return paths


def main() -> None:
    hosts = this_host()
    with tempfile.TemporaryDirectory() as folder, hosts.spawn_procs({"gpus": 4}) as procs:
        readers = procs.slice(gpus=0).spawn("readers", Reader)
        models = procs.slice(gpus=slice(1, 3)).spawn("models", Model)
        writers = procs.slice(gpus=3).spawn("writers", Writer, folder)
        pipeline = Pipeline(
            Stage(readers.read),
            Stage(readers.parse),
            Stage(models.infer, retries=1, on_crash="respawn"),
            Stage(writers.write),
            max_bytes=64 << 20,
            on_error="quarantine",
        )
        run = pipeline.run(make_shards(Path(folder)))
        print(f"{sum(run)} of {SHARDS * ROWS} rows scored")
        for bad in run.quarantined:
            print(f"set aside by {bad.stage}, of shard {bad.index}: {bad.error}".partition("\n")[0])
        print(f"slowest: {run.stats.slowest}")


if __name__ == "__main__":
    main()
