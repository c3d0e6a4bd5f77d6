"""A policy of a few lines whose memory is a sum that fades within an episode."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FADE = 0.5


class Outputs(NamedTuple):
    logits: Tensor
    values: Tensor


class Memory(NamedTuple):
    total: Tensor
    segments: Tensor


class TinyPolicy(nn.Module):
    """Logits and values are linear in the fading sum of all inputs of the episode."""

    def __init__(self, size: int, actions: int, *, continuous: bool = False) -> None:
        super().__init__()
        self.size, self.continuous = size + actions * continuous + (not continuous) + 1, continuous
        self.heads = nn.Linear(self.size, actions + 1)

    def init_state(self, batch: int) -> Memory:
        return Memory(torch.zeros(batch, self.size), torch.full((batch,), -1))

    def begin_acting(self, state: Memory) -> "TinyActor":
        return TinyActor(self, state)

    def distribution(self, logits: Tensor) -> Any:
        if not self.continuous:
            return torch.distributions.Categorical(logits=logits)
        return torch.distributions.Independent(torch.distributions.Normal(logits, torch.ones_like(logits)), 1)

    def outputs(self, total: Tensor) -> Outputs:
        y = self.heads(total)
        return Outputs(y[..., :-1], y[..., -1])


class TinyActor:
    def __init__(self, policy: TinyPolicy, state: Memory) -> None:
        self.policy, self.state = policy, state

    def total(self, observations: Tensor, segments: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        columns = actions if self.policy.continuous else actions[:, None].float()
        inputs = torch.cat([observations, columns, rewards[:, None]], 1)
        return FADE * self.state.total * (segments == self.state.segments)[:, None] + inputs

    def act(self, observations: Tensor, segments: Tensor, actions: Tensor, rewards: Tensor) -> Outputs:
        self.state = Memory(self.total(observations, segments, actions, rewards), segments)
        return self.policy.outputs(self.state.total)

    def value(self, observations: Tensor, segments: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        return self.policy.outputs(self.total(observations, segments, actions, rewards)).values

    def end(self) -> Memory:
        return self.state
