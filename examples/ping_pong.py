"""Two meshes of processes play ping-pong: each actor holds a reference to those on the other side.

A mesh that is sent to an actor arrives as a reference, and is called as it is here. The players call one another
directly: the script starts the game and hears of its end.
"""

from __future__ import annotations

from mesh_core import Actor, current_rank, endpoint, this_host

PAIRS = 2


class Player(Actor):
    """One player; which one it plays against is a matter of rank."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.said: list[str] = []

    @endpoint
    async def meet(self, others: Player) -> str:
        """Take the player of the same rank on the other side as the opponent."""
        me = current_rank()
        self.opponent = others.slice(pair=me["pair"])
        return f"{self.word} {me['pair']}"

    # Concurrent: while it waits for the opponent, the opponent calls back.
    @endpoint(concurrent=True)
    async def hit(self, ball: int) -> int:
        """Say the word, and play the ball back until it has lost its speed; return how often it was hit."""
        self.said.append(self.word)
        if ball == 0:
            return 1
        return 1 + await self.opponent.hit.call_one(ball - 1)

    @endpoint
    async def score(self) -> list[str]:
        return self.said


def main() -> None:
    here, there = this_host(), this_host()
    with here.spawn_procs({"pair": PAIRS}) as left, there.spawn_procs({"pair": PAIRS}) as right:
        ping = left.spawn("ping", Player, "ping")
        pong = right.spawn("pong", Player, "pong")
        ping.meet.call(pong).get(timeout=30)
        pong.meet.call(ping).get(timeout=30)

        for point, hits in ping.hit.call(9).get(timeout=30):
            print(f"pair {point['pair']}: {hits} hits")
        for pair in range(PAIRS):
            pings = ping.slice(pair=pair).score.call_one().get(timeout=30)
            pongs = pong.slice(pair=pair).score.call_one().get(timeout=30)
            game = [word for both in zip(pings, pongs, strict=True) for word in both]
            print(f"pair {pair}: {' '.join(game)}")


if __name__ == "__main__":
    main()
