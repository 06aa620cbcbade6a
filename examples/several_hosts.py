"""One script on several machines: which numbers below a limit are prime, and who has found out how many.

Name the addresses at which `mesh host` listens, and the job's credentials. Without any, a cluster on this machine
takes their place: the rest of the program does not know the difference.

    python several_hosts.py
    python several_hosts.py --credentials train tcp://b7:26600 tcp://b8:26600
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from mesh_core import Actor, HostMesh, SupervisionError, attach_to_workers, context, endpoint
from mesh_core.testing import LocalCluster

GPUS = 2


def is_prime(number: int) -> bool:
    return number > 1 and all(number % by for by in range(2, int(number**0.5) + 1))


class Sieve(Actor):
    """Counts the primes in a share of the numbers."""

    @endpoint
    def count(self, limit: int) -> int:
        """Look at a share of the numbers below the limit: which one, the place of this actor in its mesh says."""
        place = context().actor_instance.rank
        first, last = (limit * part // place.extent.nelements for part in (place.rank, place.rank + 1))
        return sum(is_prime(number) for number in range(first, last))


@contextmanager
def hosts_of(addresses: list[str], credentials: str) -> Iterator[tuple[HostMesh, LocalCluster | None]]:
    """The hosts: those that were named, or else three on this machine."""
    if addresses:
        yield attach_to_workers(addresses, credentials=credentials), None
        return
    with LocalCluster(hosts=3) as cluster:
        yield cluster.attach(), cluster


def main() -> None:
    parser = argparse.ArgumentParser(description="count primes on several hosts")
    parser.add_argument("addresses", nargs="*", help="where `mesh host` listens; none: hosts on this machine")
    parser.add_argument("--credentials", default="train", help="the folder of `mesh credentials new`")
    parser.add_argument("--limit", type=int, default=30_000)
    args = parser.parse_args()
    with hosts_of(args.addresses, args.credentials) as (hosts, cluster):
        hosts.initialized.get(timeout=60)
        print(f"{len(hosts)} hosts: {', '.join(hosts.names)}")
        with hosts.spawn_procs({"gpus": GPUS}) as procs:
            # A host that dies is an error for those who call it; that is enough, the rest of the mesh goes on.
            sieves = procs.spawn("sieves", Sieve, supervise=lambda failure: True)
            counts = sieves.count.call(args.limit).get(timeout=120)
            print(f"{sum(counts.values())} primes below {args.limit}")
            for number in range(len(hosts)):
                print(f"{hosts.names[number]} has found {sum(counts.slice(hosts=number).values())}")
            if cluster is None:
                return
            cluster.kill(2)
            error = sieves.slice(hosts=2, gpus=0).count.call_one(args.limit).exception(timeout=60)
            print(f"{hosts.names[2]} is dead: {isinstance(error, SupervisionError)}")
            rest = sieves.slice(hosts=slice(0, 2)).count.call(args.limit).get(timeout=120)
            print(f"the others go on: {rest.values() == counts.slice(hosts=slice(0, 2)).values()}")


if __name__ == "__main__":
    main()
