"""Tasks of recall: a bit that is shown once (Osband et al. 2020), and the suit of a card (Morad et al. 2023)."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from manyformer.environments.array_environment import ArrayEnvironment, Outcome
from manyformer.environments.vector_environment import Array, random_words
from manyformer.errors import UserError
from manyformer.spaces import DiscreteActions, VectorSpace
from manyformer.type_aliases import IntArray

SUITS = 4
DECK = 52


@final
class MemoryLengthTask(ArrayEnvironment):
    """Shows a random sign at the first step and asks for it `length` steps later: reward 1 if it is named, else -1.

    bsuite's `memory_len` with one bit (Osband et al. 2020, arXiv:1908.03568). An observation is the share of the time
    that is left, 1 at the step of the question, and the sign at the first step (zeros otherwise); only the last of the
    `length` + 1 actions counts, 1 for the positive sign. A memoryless policy has a return of 0 at best.
    """

    name = "memory-length"
    observations = VectorSpace(3)
    actions = DiscreteActions(2)
    success_return = 1.0

    def __init__(self, rows: int, *, length: int = 60) -> None:
        self.length = length
        self.longest = length + 1
        super().__init__(rows)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        return {"context": (random_words(seeds, 0) >> np.uint64(63)).astype(np.int64)}

    def _advance(self, actions: Array) -> Outcome:
        answered = self.clock == self.length
        right = actions == self._state["context"]
        return Outcome(np.where(answered, np.where(right, 1.0, -1.0), 0.0), answered, np.zeros_like(answered))

    def _observe(self) -> NDArray[np.float32]:
        time_left = 1 - self.clock / self.length
        shown = np.where(self.clock == 0, 2 * self._state["context"] - 1, 0)
        return np.stack([time_left, self.clock == self.length, shown], axis=1).astype(np.float32)


@final
class RepeatPrevious(ArrayEnvironment):
    """Deals shuffled `decks` of 52 cards one by one; the action names the suit dealt `lag` - 1 steps before the latest.

    POPGym's `RepeatPrevious` (Morad et al. 2023, arXiv:2303.01859, appendix): its reward compares the action with the
    card `lag` places from the end before the next card is dealt, so the latest card itself counts as the first place. A
    step is worth 1 over the number of judged steps, positive if right, else negative; steps with fewer than `lag` cards
    are worth 0. An observation is the suit of the latest card as a vector of four. The optimum is 1, chance -0.5.
    """

    name = "repeat-previous"
    observations = VectorSpace(SUITS)
    actions = DiscreteActions(SUITS)

    def __init__(self, rows: int, *, lag: int = 4, decks: int = 1) -> None:
        self.lag = lag
        self.cards = DECK * decks
        if lag >= self.cards:
            raise UserError(f"lag is {lag}, but {decks} decks have {self.cards} cards; it must be less")
        self.longest: int = self.cards - 1
        super().__init__(rows)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        order = random_words(seeds[:, None], np.arange(self.cards)).argsort(axis=1, kind="stable")
        return {"suits": order % SUITS}

    def _advance(self, actions: Array) -> Outcome:
        places = self.clock - (self.lag - 1)
        asked = self._state["suits"][np.arange(self.rows), np.maximum(places, 0)]
        signs = np.where(actions == asked, 1.0, -1.0)
        ended = self.clock == self.longest - 1
        return Outcome(np.where(places >= 0, signs / (self.cards - self.lag), 0.0), ended, np.zeros_like(ended))

    def _observe(self) -> NDArray[np.float32]:
        latest = self._state["suits"][np.arange(self.rows), self.clock]
        return np.eye(SUITS, dtype=np.float32)[latest]
