"""A process's random numbers: different on every rank, and reproducible if a seed was given.

Generators imported before a fork would otherwise have the same state on all ranks.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from mesh_core._common.checks import is_whole

if TYPE_CHECKING:
    from mesh_core._common.import_hooks import Afterwards


class Seeds:
    """The root of a process's seeds."""

    def __init__(self, seed: int | None = None, rank: int = 0) -> None:
        self.given = seed is not None
        """Whether reproducible numbers were asked for."""
        self._root = os.urandom(32) if seed is None else f"{seed}/{rank}".encode()

    def of(self, label: str, size: int = 8) -> int:
        """Return a number of ``size`` bytes, different for each process and label."""
        import hashlib

        key = hashlib.blake2b(self._root, digest_size=32).digest()
        return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=size, key=key).digest(), "little")


def checked_seed(seed: object) -> int | None:
    """Return ``seed=`` if it is valid; raise otherwise."""
    if seed is not None and not is_whole(seed):
        raise TypeError(f"seed must be a whole number, or None, got {seed!r}")
    return seed


def seed_process(seeds: Seeds, hook: Afterwards) -> None:
    """Seed this process's generators: those imported already and, if a seed was given, also those imported later."""
    for module, seed in (("random", _random), ("numpy.random", _numpy), ("torch", _torch)):
        if seeds.given:
            hook.once(module, lambda seed=seed: seed(seeds))  # type: ignore[misc]
        elif sys.modules.get(module) is not None:
            seed(seeds)


def _random(seeds: Seeds) -> None:
    # Without a seed Python itself reseeds after every fork.
    if seeds.given:
        sys.modules["random"].seed(seeds.of("random", 32))


def _numpy(seeds: Seeds) -> None:
    numpy_random = sys.modules["numpy.random"]
    if not seeds.given:
        numpy_random.seed()
        return
    words = seeds.of("numpy", 32)
    numpy_random.seed([words >> 32 * n & 0xFFFFFFFF for n in range(8)])


def _torch(seeds: Seeds) -> None:
    number = seeds.of("torch") if seeds.given else int.from_bytes(os.urandom(8), "little")
    # Generators of devices are seeded when the device is first used.
    sys.modules["torch"].manual_seed(number >> 1)


def rank_seed(label: str = "") -> int:
    """Return a number to seed a generator with: different in every process, and reproducible with ``seed=``.

    For libraries whose generators Mesh does not know. Each ``label`` gives a different number of 63 bits, and the same label
    always the same one. Without ``seed=`` in :meth:`HostMesh.spawn_procs` the numbers come from the operating system.

    >>> from mesh_core import Actor, endpoint, rank_seed, this_host
    >>> class Sampler(Actor):
    ...     @endpoint
    ...     def seed(self) -> int:
    ...         return rank_seed("sampler")
    >>> def seeds() -> list[int]:
    ...     with this_host().spawn_procs({"gpus": 2}, seed=7) as procs:
    ...         return procs.spawn("samplers", Sampler).seed.call().get().values()
    >>> first, second = seeds()
    >>> first != second, seeds() == [first, second]
    (True, True)
    """
    from mesh_core._common.current import current

    return current().seeds.of(f"user/{label}") >> 1
