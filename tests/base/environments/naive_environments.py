"""Each of our own tasks for one episode, written down as its paper tells it: the reference of the vectorised ones."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class NaiveStep(NamedTuple):
    """Observation and reward of one step, and how the episode ended: "" if it goes on."""

    observation: list[float]
    reward: float
    end: str = ""


class NaiveMemoryLength:
    def __init__(self, *, length: int, context: int) -> None:
        self.length, self.context, self.t = length, context, 0

    def observe(self) -> list[float]:
        cue = (1.0 if self.context else -1.0) if self.t == 0 else 0.0
        return [1 - self.t / self.length, float(self.t == self.length), cue]

    def step(self, action: int) -> NaiveStep:
        asked = self.t == self.length
        reward = (1.0 if action == self.context else -1.0) if asked else 0.0
        self.t += 1
        return NaiveStep(self.observe(), reward, "terminated" if asked else "")


class NaiveTMaze:
    def __init__(self, *, length: int, lead: int, goal: int) -> None:
        self.length, self.lead, self.goal = length, lead, goal
        self.x, self.y, self.t, self.visits = lead, 0, 0, int(lead == 0)

    def observe(self, *, arrived: bool) -> list[float]:
        if self.x == self.length + self.lead:
            return [1.0, float(self.y)]
        return [0.0, float(self.goal) if self.x == 0 and arrived and self.visits == 1 else 0.0]

    def step(self, action: int) -> NaiveStep:
        self.t += 1
        dx, dy = [(1, 0), (0, 1), (-1, 0), (0, -1)][action]
        x, y = self.x + dx, self.y + dy
        junction = self.length + self.lead
        if (0 <= x <= junction and y == 0) or (x == junction and y in (-1, 0, 1)):
            moved = (x, y) != (self.x, self.y)
            self.x, self.y = x, y
        else:
            moved = False
        arrived = moved and self.x == 0
        self.visits += arrived
        horizon = self.length + 2 * self.lead + 1
        if self.t == horizon:
            return NaiveStep(self.observe(arrived=arrived), float(self.y == self.goal), "terminated")
        late = self.x < self.t - self.lead
        return NaiveStep(self.observe(arrived=arrived), -1 / (horizon - 1) if late else 0.0)


class NaiveRepeatPrevious:
    def __init__(self, *, lag: int, suits: Sequence[int]) -> None:
        self.lag, self.deck, self.hand = lag, list(suits[1:]), [suits[0]]
        self.cards = len(suits)

    def observe(self) -> list[float]:
        return [float(suit == self.hand[-1]) for suit in range(4)]

    def step(self, action: int) -> NaiveStep:
        worth, reward = 1 / (self.cards - self.lag), 0.0
        if len(self.hand) >= self.lag:
            reward = worth if action == self.hand[-self.lag] else -worth
        self.hand.append(self.deck.pop(0))
        return NaiveStep(self.observe(), reward, "" if self.deck else "terminated")


class NaiveCartPole:
    def __init__(self, *, length: int, motion: Sequence[float]) -> None:
        self.length, self.motion, self.t = length, list(motion), 0

    def observe(self) -> list[float]:
        return [self.motion[0], self.motion[2]]

    def step(self, action: int) -> NaiveStep:
        x, speed, angle, spin = self.motion
        force = 10.0 if action else -10.0
        push = (force + 0.05 * spin**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        acceleration = push - 0.05 * turn * math.cos(angle) / 1.1
        self.motion = [x + 0.02 * speed, speed + 0.02 * acceleration, angle + 0.02 * spin, spin + 0.02 * turn]
        self.t += 1
        if abs(self.motion[0]) > 2.4 or abs(self.motion[2]) > math.radians(12):
            return NaiveStep(self.observe(), 1.0, "terminated")
        return NaiveStep(self.observe(), 1.0, "truncated" if self.t == self.length else "")


class NaiveGraph:
    """A walk over tables of successors, -1 for the end, and of rewards."""

    def __init__(self, *, successors: list[list[int]], rewards: list[list[float]], length: int, node: int) -> None:
        self.successors, self.rewards, self.length, self.node, self.clock = successors, rewards, length, node, 0

    def observe(self) -> list[float]:
        return [float(node == self.node) for node in range(len(self.successors))]

    def step(self, action: int) -> NaiveStep:
        reward, following = self.rewards[self.node][action], self.successors[self.node][action]
        self.clock += 1
        self.node = self.node if following == -1 else following
        end = "terminated" if following == -1 else "truncated" if self.clock == self.length else ""
        return NaiveStep(self.observe(), reward, end)
