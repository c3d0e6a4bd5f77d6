"""CartPole without velocities: a pole is balanced from the positions alone."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from manyformer.environments.array_environment import INK, MARK, ArrayEnvironment, Outcome, blank
from manyformer.environments.vector_environment import Array, random_fractions
from manyformer.spaces import DiscreteActions, VectorSpace
from manyformer.type_aliases import IntArray

GRAVITY = 9.8
CART_MASS = 1.0
POLE_MASS = 0.1
HALF_POLE = 0.5
FORCE = 10.0
SECONDS = 0.02
MAX_POSITION = 2.4
MAX_ANGLE = 12 * np.pi / 180
FIRST_RANGE = 0.05
"""The largest size of a number of the first state."""
SCALE = 40
"""Pixels for a metre of the picture."""


@final
class HiddenVelocityCartPole(ArrayEnvironment):
    """Balances a pole on a cart by pushing left (0) or right (1); only the position and the angle are observed.

    Physics and limits are those of gymnasium's `CartPole-v1` (Barto, Sutton and Anderson 1983), with a reward of 1 at
    each step and at most `length` steps, at which an episode is truncated; velocities must be remembered from earlier
    positions. The optimum is `length`.
    """

    name = "hidden-velocity-cartpole"
    observations = VectorSpace(2)
    actions = DiscreteActions(2)

    def __init__(self, rows: int, *, length: int = 500) -> None:
        self.longest = length
        # the share of the steps at which CartPole-v1 counts as solved
        self.success_return = 0.95 * length
        super().__init__(rows)

    def _first_state(self, seeds: IntArray) -> dict[str, Array]:
        return {"motion": FIRST_RANGE * (2 * random_fractions(seeds[:, None], np.arange(4)) - 1)}

    def _advance(self, actions: Array) -> Outcome:
        _, speed, angle, spin = self._state["motion"].T
        force = np.where(actions == 1, FORCE, -FORCE)
        sine = np.sin(angle)
        cosine = np.cos(angle)
        mass = CART_MASS + POLE_MASS
        push = (force + POLE_MASS * HALF_POLE * spin**2 * sine) / mass
        turn = (GRAVITY * sine - cosine * push) / (HALF_POLE * (4 / 3 - POLE_MASS * cosine**2 / mass))
        acceleration = push - POLE_MASS * HALF_POLE * turn * cosine / mass
        derivatives = np.stack([speed, acceleration, spin, turn], axis=1)
        self._state["motion"] = motion = self._state["motion"] + SECONDS * derivatives
        terminated = (np.abs(motion[:, 0]) > MAX_POSITION) | (np.abs(motion[:, 2]) > MAX_ANGLE)
        truncated = (self.clock + 1 == self.longest) & ~terminated
        return Outcome(np.ones(self.rows), terminated, truncated)

    def _observe(self) -> NDArray[np.float32]:
        return self._state["motion"][:, ::2].astype(np.float32)

    def frame(self) -> NDArray[np.uint8]:
        """The cart on its track with the pole."""
        picture = blank(120, round(2 * MAX_POSITION * SCALE) + 40)
        x, _, angle, _ = self._state["motion"][0]
        column = round((x + MAX_POSITION) * SCALE) + 20
        picture[100] = INK
        picture[90:100, max(0, column - 15) : column + 15] = INK
        along = np.linspace(0, 2 * HALF_POLE * SCALE * 1.5, 200)
        rows = (90 - along * np.cos(angle)).astype(int)
        columns = (column + along * np.sin(angle)).astype(int)
        inside = (columns > 0) & (columns < picture.shape[1] - 2)
        for offset in (0, 1):
            picture[rows[inside], columns[inside] + offset] = MARK
        return picture
