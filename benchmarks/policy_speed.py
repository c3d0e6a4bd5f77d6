"""What acting and learning cost a policy with a memory, in environments that take no time.

    python benchmarks/policy_speed.py --threads 1               # about 3 minutes on a quiet core
    python benchmarks/policy_speed.py --only acting --rounds 5

All policies act for 128 steps in 32 environments, and then learn from these in 3 epochs of 8 minibatches: the gated
Transformer-XL (d 64, 4 layers, 4 heads, memory 64), our LSTM and, where sb3-contrib is installed, the LSTM of its
RecurrentPPO, both of width 64. A part also measures what 100 steps cost at the beginning of a long rollout and after
10,000 steps.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import frame
import numpy as np
import torch
from steps import train
from torch import Tensor

import manyformer as mf
from manyformer.models import PolicyModel
from manyformer.nn.batches.episode_batches import RolloutBatch
from manyformer.nn.core import State, tree_map

ENVIRONMENTS, STEPS, EPOCHS, MINIBATCHES = 32, 128, 3, 8
OBSERVATION, ACTIONS, EPISODE = 10, 4, 50
SIZE = {"observations": OBSERVATION, "actions": ACTIONS, "dim": 64}
RECIPES: dict[str, dict[str, Any]] = {
    "gtrxl": {"depth": 4, "heads": 4, "ff_dim": 256, "memory_length": 64},
    "lstm-policy": {},
}
PEER = "sb3-contrib RecurrentPPO"
GOALS = {PEER: 2.0}
LATER, GROUP = 10_000, 100


class Candidate(NamedTuple):
    """A rollout, and the training on it."""

    act: frame.Step
    learn: frame.Step


class Policy:
    """A model of ours that acts and learns."""

    def __init__(self, recipe: str) -> None:
        model = mf.build(recipe, **SIZE, **RECIPES[recipe])
        assert isinstance(model, PolicyModel)
        self.model, self.state, self.start = model, model.init_state(ENVIRONMENTS), model.init_state(ENVIRONMENTS)
        self.segments = torch.zeros(ENVIRONMENTS, dtype=torch.long)
        self.observations = torch.randn(ENVIRONMENTS, STEPS, OBSERVATION)
        self.rewards = torch.zeros(ENVIRONMENTS)
        self.steps: list[tuple[Tensor, ...]] = []
        self.rows: Tensor | None = None
        self.update = train(model, self._loss)

    def act(self) -> None:
        """One rollout, from the state after the one before it."""
        self.model.eval()
        self.start, actor, self.steps = self.state, self.model.begin_acting(self.state), []
        actions = torch.full((ENVIRONMENTS,), -1)
        with torch.no_grad():
            for step in range(STEPS):
                if step % EPISODE == 0:
                    self.segments = self.segments + 1
                previous = actions
                logits, values = actor.act(self.observations[:, step], self.segments, previous, self.rewards)
                distribution = self.model.distribution(logits)
                actions = distribution.sample()
                self.steps.append((actions, self.segments, previous, distribution.log_prob(actions), values))
            self.state = actor.end()

    def learn(self) -> None:
        """Epochs over the environments of the latest rollout."""
        self.model.train()
        for _ in range(EPOCHS):
            for self.rows in torch.randperm(ENVIRONMENTS).chunk(MINIBATCHES):
                self.update()

    def _loss(self) -> Tensor:
        rows = self.rows
        actions, segments, previous, log_probs, values = (torch.stack(parts, 1)[rows] for parts in zip(*self.steps))
        state: State = tree_map(lambda tensor: tensor[rows], self.start)
        advantages, rewards = torch.randn(log_probs.shape), torch.zeros(log_probs.shape)
        observations = self.observations[rows]
        batch = RolloutBatch(
            observations, actions, advantages, rewards, segments, previous, rewards, log_probs, values, state
        )
        loss = self.model.loss(batch)
        return loss.total / loss.targets


def recurrent_ppo() -> Candidate:
    """The same by sb3-contrib; its environments return constants, which takes next to nothing."""
    import gymnasium
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import ConvertCallback
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Constant(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(-1, 1, (OBSERVATION,))
        action_space = gymnasium.spaces.Discrete(ACTIONS)
        observation = np.zeros(OBSERVATION, dtype=np.float32)

        def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
            self.count = 0
            return self.observation, {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.count += 1
            return self.observation, 0.0, self.count == EPISODE, False, {}

    model = RecurrentPPO(
        "MlpLstmPolicy",
        DummyVecEnv([Constant] * ENVIRONMENTS),
        n_steps=STEPS,
        batch_size=ENVIRONMENTS * STEPS // MINIBATCHES,
        n_epochs=EPOCHS,
        policy_kwargs={"lstm_hidden_size": SIZE["dim"], "net_arch": [SIZE["dim"]]},
        device="cpu",
    )
    model._setup_learn(total_timesteps=10**9)
    callback = ConvertCallback(None)
    callback.init_callback(model)
    environments, buffer = model.env, model.rollout_buffer
    assert environments is not None
    return Candidate(lambda: model.collect_rollouts(environments, callback, buffer, STEPS), model.train)


def candidates() -> dict[str, Candidate]:
    """All policies that can be measured here."""
    policies = {recipe: Policy(recipe) for recipe in RECIPES}
    found = {recipe: Candidate(policy.act, policy.learn) for recipe, policy in policies.items()}
    if importlib.util.find_spec("sb3_contrib") is not None:
        found[PEER] = recurrent_ppo()
    return found


def contest_of(what: str, step_of: Callable[[Candidate], frame.Step]) -> frame.BenchmarkPart:
    """A part in which every policy does the same."""

    def part(rounds: int) -> Iterator[frame.BenchmarkRow]:
        found = candidates()
        for candidate in found.values():
            candidate.act()
        steps = {name: step_of(candidate) for name, candidate in found.items()}
        yield from frame.contest(f"{what}, {ENVIRONMENTS} x {STEPS} steps", steps, rounds, GOALS)

    return part


def both(candidate: Candidate) -> frame.Step:
    """A rollout and the training on it."""

    def step() -> None:
        candidate.act()
        candidate.learn()

    return step


def long_rollout(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Steps with a memory that has just been filled, and after many others."""
    policy, actions = Policy("gtrxl"), torch.zeros(ENVIRONMENTS, dtype=torch.long)

    def begin() -> frame.Step:
        actor = policy.model.eval().begin_acting(policy.state)

        def act() -> None:
            for _ in range(GROUP):
                actor.act(policy.observations[:, 0], policy.segments, actions, policy.rewards)

        return act

    early, late = begin(), begin()
    for _ in range(LATER // GROUP):
        late()
    steps = {f"after {LATER:,} steps": late, f"after {GROUP} steps": early}
    yield from frame.contest(f"{GROUP} steps of acting", steps, rounds, {f"after {GROUP} steps": 1.2})


PARTS: dict[str, frame.BenchmarkPart] = {
    "acting": contest_of("acting", lambda candidate: candidate.act),
    "learning": contest_of("learning", lambda candidate: candidate.learn),
    "both": contest_of("acting and learning", both),
    "long": long_rollout,
}

if __name__ == "__main__":
    frame.run(__doc__, PARTS, rounds=7, out="policy_speed.json")
