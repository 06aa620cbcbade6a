"""The other process of a test of publications: a publisher or a reader, which does what it is told on stdin."""

import gc
import os
import pickle
import struct
import sys
from typing import Any

import numpy as np

from mesh_rdma import Publication, PublicationReader, Weights


def state_of(number: int, sizes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {f"tensor-{n}": np.full(size, number, np.int64) for n, size in enumerate(sizes)}


def numbers_in(weights: Any) -> set[int]:
    """All values that are anywhere in a version: its own number, if it is whole."""
    return {int(value) for array in weights.values() for value in np.unique(array)}


class Peer:
    """What the test can ask for. Each method's result, or exception, is the answer."""

    def __init__(self) -> None:
        self.publications: dict[str, Publication] = {}
        self.states: dict[str, dict[str, np.ndarray]] = {}
        self.held: dict[str, Weights] = {}
        self.arrays: list[np.ndarray] = []

    def publication(
        self,
        key: str,
        *,
        sizes: tuple[int, ...] = (1000, 10),
        state: Any = None,
        known_as: str | None = None,
        **options: Any,
    ) -> PublicationReader:
        self.states[key] = state_of(0, sizes) if state is None else state
        self.publications[key] = Publication(self.states[key], name=known_as, **options)
        return self.publications[key].reader()

    def publish(self, key: str, number: int | None = None, **options: Any) -> int:
        """Publish tensors whose every value is the version's number."""
        publication = self.publications[key]
        for array in self.states[key].values():
            array[...] = 0 if number is None else number
        return publication.publish(version=number, **options)

    def publish_as_it_is(self, key: str, number: int) -> int:
        return self.publications[key].publish(version=number)

    def leases(self, key: str) -> list[tuple[int, int]]:
        return self.publications[key].leases

    def failures(self, key: str) -> list[Any]:
        return self.publications[key].failures

    def close(self, key: str) -> None:
        self.publications[key].close()

    def joined(self, key: str) -> bool:
        return self.publications[key].join(30)

    def forget(self, key: str) -> None:
        del self.publications[key]
        gc.collect()

    def use(self, reader: PublicationReader, key: str, **options: Any) -> int:
        """Take a lease, and keep it."""
        self.held[key] = reader.use(**options)
        return self.held[key].version

    def look(self, key: str) -> set[int]:
        return numbers_in(self.held[key])

    def keep_array(self, key: str) -> None:
        self.arrays.append(self.held[key]["tensor-0"])

    def look_at_arrays(self) -> list[int]:
        return sorted({int(value) for array in self.arrays for value in np.unique(array)})

    def drop_arrays(self) -> None:
        self.arrays.clear()

    def release(self, key: str) -> None:
        self.held.pop(key).release()

    def read(self, reader: PublicationReader, **options: Any) -> tuple[int, set[int]]:
        with reader.use(**options) as weights:
            return weights.version, numbers_in(weights)

    def fork(self) -> int:
        """Fork a child that goes on until it is killed."""
        pid = os.fork()
        if pid == 0:
            read, _ = os.pipe()
            os.read(read, 1)
        return pid


def answer(value: Any) -> None:
    data = pickle.dumps(value)
    sys.stdout.buffer.write(struct.pack("=Q", len(data)) + data)
    sys.stdout.buffer.flush()


def main() -> None:
    peer = Peer()
    while head := sys.stdin.buffer.read(8):
        name, arguments, options = pickle.loads(sys.stdin.buffer.read(struct.unpack("=Q", head)[0]))
        try:
            result = getattr(peer, name)(*arguments, **options)
        except Exception as error:
            result = error
        answer(result)


if __name__ == "__main__":
    main()
