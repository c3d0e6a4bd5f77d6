"""Repeat previous: cards are dealt, and the suit of an earlier one must be named at each step (Morad et al. 2023)."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from manyformer.environments.array_environment import ArrayEnvironment, Outcome
from manyformer.environments.drawings import draw_bars
from manyformer.environments.episode_seeds import random_words
from manyformer.environments.vector_environment import Array
from manyformer.errors import UserError
from manyformer.spaces import DiscreteActions, VectorSpace
from manyformer.type_aliases import IntArray

SUITS, DECK = 4, 52


@final
class RepeatPrevious(ArrayEnvironment):
    """Deals shuffled `decks` of 52 cards one by one; the action names the suit dealt `lag` - 1 steps before the latest.

    POPGym's `RepeatPrevious` (Morad et al. 2023, arXiv:2303.01859, appendix): its reward compares the action with the
    card `lag` places from the end before the next card is dealt, so the latest card itself counts as the first place. A
    step is worth 1 over the number of judged steps, positive if right, else negative; steps with fewer than `lag` cards
    are worth 0. An observation is the suit of the latest card as a vector of four. The optimum is 1, chance -0.5.
    """

    name = "repeat-previous"
    observations, actions = VectorSpace(SUITS), DiscreteActions(SUITS)

    def __init__(self, rows: int, *, lag: int = 4, decks: int = 1) -> None:
        self.lag, self.cards = lag, DECK * decks
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

    def frame(self) -> NDArray[np.uint8]:
        """The suit of the latest card as one of four bars."""
        return draw_bars(self._observe()[0])
