"""Sampling and scoring never run at once where they take turns, and all that waits is let go together."""

import asyncio
import random

import pytest

from verl.trainer.ppo.sources.device_turns import SAMPLE, SCORE, DeviceTurns


class Watched:
    """Turns that note who runs, and when a turn begins."""

    def __init__(self):
        self.running, self.begun, self.together = {SAMPLE: 0, SCORE: 0}, [], 0

        async def begin(turn: str) -> None:
            assert not any(self.running.values()), "a turn began while somebody ran"
            await asyncio.sleep(0.001)
            self.begun.append(turn)

        self.turns = DeviceTurns({turn: lambda turn=turn: begin(turn) for turn in (SAMPLE, SCORE)})

    async def run(self, turn: str, seconds: float) -> None:
        async with self.turns.take(turn):
            self.running[turn] += 1
            self.together = max(self.together, self.running[turn])
            assert not (self.running[SAMPLE] and self.running[SCORE])
            await asyncio.sleep(seconds)
            self.running[turn] -= 1


def test_everything_is_sampled_first_and_then_scored_together():
    watched = Watched()

    async def one(seconds: float) -> None:
        await watched.run(SAMPLE, seconds)
        await watched.run(SCORE, 0.001)

    async def main() -> None:
        await asyncio.gather(*(one(0.001 * n) for n in range(12)))

    asyncio.run(main())
    assert watched.begun == [SCORE] and watched.together == 12


def test_random_turns_and_cancellations_never_overlap_and_never_hang():
    async def main(seed: int) -> None:
        draw, watched = random.Random(seed), Watched()

        async def one() -> None:
            for _ in range(draw.randrange(1, 4)):
                await watched.run(draw.choice((SAMPLE, SCORE)), draw.random() * 0.003)

        tasks = [asyncio.create_task(one()) for _ in range(8)]
        for task in draw.sample(tasks, 3):
            await asyncio.sleep(draw.random() * 0.003)
            if not any(watched.running.values()):  # one that runs would leave its count behind
                task.cancel()
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(isinstance(end, asyncio.CancelledError | None) for end in ended)
        for turn in (SCORE, SAMPLE):
            await asyncio.wait_for(watched.run(turn, 0), 10)

    for seed in range(20):
        asyncio.run(main(seed))


def test_a_turn_that_cannot_begin_is_the_error_of_those_that_wait():
    async def fail() -> None:
        raise OSError("it does not wake")

    async def main() -> None:
        turns = DeviceTurns({SAMPLE: fail, SCORE: fail})
        with pytest.raises(OSError, match="does not wake"):
            async with turns.take(SCORE):
                pass

    asyncio.run(main())
