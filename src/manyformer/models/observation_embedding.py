"""The input of a policy: the observation, and optionally the previous action and reward."""

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from manyformer.base.spaces import ObservationSpace, PixelSpace
from manyformer.nn.decoding.acting_step import bind_rows
from manyformer.nn.runtime.torch_internals import is_plain, weight_dtype

PIXEL_CHANNELS = (16, 32, 32)
"""The channels of the convolutions over pixels, each of which halves height and width."""


EmbedStep = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""From observations (b, ...), previous actions and previous rewards of one step to its embedding (b, d)."""


@final
class ObservationEmbedding(nn.Module):
    """The sum of projections of the observation, of the previous action and of the previous reward (b, l, d).

    Vectors are projected linearly, pixels (bytes, divided by 255) by three convolutions of stride 2 with ReLU and a
    linear layer. A previous action is embedded, or projected if `continuous`; -1 is no previous action, which has an
    embedding of its own. Without `previous_inputs` the embedding reads the observation alone."""

    def __init__(
        self, space: ObservationSpace, dim: int, *, actions: int, continuous: bool, previous_inputs: bool
    ) -> None:
        super().__init__()
        self.space = space
        self.dim = dim
        self.continuous = continuous
        self.observation: nn.Module
        if isinstance(space, PixelSpace):
            self.observation = _pixel_projection(space, dim)
        else:
            self.observation = nn.Linear(space.size, dim)
        self.action: nn.Module | None = None
        self.reward: nn.Linear | None = None
        if previous_inputs:
            if continuous:
                self.action = nn.Linear(actions, dim, bias=False)
            else:
                self.action = nn.Embedding(actions + 1, dim)
            self.reward = nn.Linear(1, dim, bias=False)
            nn.init.normal_(self.action.weight, std=dim**-0.5)

    def forward(
        self,
        observations: Shaped[Tensor, "b l *shape"],
        previous_actions: Shaped[Tensor, "b l *a"] | None,
        previous_rewards: Float[Tensor, "b l"] | None,
    ) -> Float[Tensor, "b l d"]:
        """The embedding of each step. Raises ValueError for observations of another space."""
        if observations.shape[2:] != self.space.shape:
            expected = ", ".join(map(str, self.space.shape))
            raise ValueError(f"observations {tuple(observations.shape)} must be (b, l, {expected})")
        dtype = self.observation_dtype
        if isinstance(self.space, PixelSpace):
            # (b, l, h, w, c) to (b l, c, h, w), bytes to 0 to 1
            images = observations.flatten(0, 1).permute(0, 3, 1, 2).to(dtype) / 255
            x: Tensor = self.observation(images).view(*observations.shape[:2], self.dim)
        else:
            x = self.observation(observations.to(dtype))
        if self.action is None or self.reward is None:
            return x
        if previous_actions is None or previous_rewards is None:
            raise ValueError("this policy also reads the previous actions and rewards, which are None")
        if self.continuous:
            action_inputs = previous_actions.to(dtype)
        else:
            # no action is -1, the first entry of the table
            action_inputs = previous_actions + 1
        embedded: Tensor = x + self.action(action_inputs) + self.reward(previous_rewards.to(dtype)[..., None])
        return embedded

    def bind_step(self) -> EmbedStep:
        """The embedding of one step of each row, bound to its current parameters; `forward` serves pixels."""
        action = self.action
        reward = self.reward
        observation = self.observation
        if not is_plain(observation, nn.Linear) or any(not is_plain(part, type(part)) for part in self.modules()):
            return self._forward_step
        project = bind_rows(observation.weight, observation.bias)
        dtype = self.observation_dtype
        if action is None or reward is None:
            return lambda observations, actions, rewards: project(observations.to(dtype))
        if not is_plain(reward, nn.Linear) or type(action) not in (nn.Linear, nn.Embedding):
            return self._forward_step
        # a projection of one number is a product with a vector
        reward_weight = reward.weight[:, 0]
        is_projected = isinstance(action, nn.Linear)
        table = next(action.parameters())
        # bound in either case, and called for continuous actions alone
        project_action = bind_rows(table, None)

        def embed(observations: Tensor, actions: Tensor | None, rewards: Tensor | None) -> Tensor:
            if actions is None or rewards is None:
                return self._forward_step(observations, actions, rewards)
            x = project(observations.to(dtype))
            x = x + (project_action(actions.to(dtype)) if is_projected else F.embedding(actions + 1, table))
            return torch.addcmul(x, rewards.to(dtype)[:, None], reward_weight)

        return embed

    def _forward_step(self, observations: Tensor, actions: Tensor | None, rewards: Tensor | None) -> Tensor:
        previous_inputs = (None if part is None else part[:, None] for part in (actions, rewards))
        x: Tensor = self(observations[:, None], *previous_inputs)
        return x[:, 0]

    @property
    def observation_dtype(self) -> torch.dtype:
        """The dtype of the weights, to which observations are converted."""
        return weight_dtype(self.observation)


def _pixel_projection(space: PixelSpace, dim: int) -> nn.Sequential:
    """Three convolutions, and a linear layer that maps what they give to `dim` channels."""
    layers: list[nn.Module] = []
    channels = space.channels
    height = space.height
    width = space.width
    for out_channels in PIXEL_CHANNELS:
        layers += [nn.Conv2d(channels, out_channels, 3, stride=2, padding=1), nn.ReLU()]
        channels = out_channels
        # rounded up, as a convolution of stride 2 with padding 1 does
        height = (height + 1) // 2
        width = (width + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, dim))
