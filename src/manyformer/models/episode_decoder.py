"""Acting with a Decision Transformer, one time step after another."""

from collections import deque
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.models.decision_transformer import DecisionTransformer, stream_positions
from manyformer.models.generative_model import ModelState
from manyformer.models.model import apply_head


@final
class EpisodeDecoder:
    """The actions of episodes that begin together, a row each, from the last `window` time steps of the model.

    It equals the model applied to these steps alone in every call (Chen et al. 2021, algorithm 1). The keys of deeper
    layers depend on all steps that their layer saw, so a cache serves only while the episode fits into the window, with
    as many tokens per call as a time step has; after that, and for bodies without exact incremental decoding, the
    window is computed again. For use without gradients, in evaluation mode."""

    def __init__(self, model: DecisionTransformer, rows: int) -> None:
        self._model = model
        self._num_steps = 0
        if model.decodes_incrementally:
            self._state: ModelState | None = model.init_state(rows)
        else:
            self._state = None
        self._returns = deque[Tensor](maxlen=model.window)
        self._observations = deque[Tensor](maxlen=model.window)
        self._actions = deque[Tensor](maxlen=model.window)

    def step(
        self, returns: Float[Tensor, " b"], observations: Float[Tensor, "b f"], previous_actions: Tensor | None = None
    ) -> Float[Tensor, "b n"]:
        """The logits of the next actions, given the returns that are to follow and what is observed now.

        `previous_actions` are those taken at the step before, None only at the first step."""
        assert (previous_actions is None) == (self._num_steps == 0)
        self._returns.append(returns)
        self._observations.append(observations)
        if previous_actions is not None:
            self._actions.append(previous_actions)
        self._num_steps += 1
        if self._num_steps > self._model.window:
            self._state = None
        if self._state is None:
            return self._recompute()
        return self._continue(self._state, returns[:, None], observations[:, None], previous_actions)

    def _continue(
        self,
        state: ModelState,
        returns: Float[Tensor, "b 1"],
        observations: Float[Tensor, "b 1 f"],
        previous_actions: Tensor | None,
    ) -> Float[Tensor, "b n"]:
        """The logits from the tokens that are new: the previous action, the return and the observation."""
        model = self._model
        embed = self._model.embed
        rows = len(returns)
        tokens = embed.observed(returns, observations, embed.time_vectors(self._timesteps(rows, 1)))
        if previous_actions is not None:
            previous_time = embed.time_vectors(self._timesteps(rows, 1) - 1)
            tokens.insert(0, embed.acted(model.action_vectors(previous_actions[:, None]), previous_time))
        positions, tail = stream_positions(rows, len(tokens), model.device, None, state)
        hidden = model.run_tokens(embed.finish(torch.cat(tokens, 1)), positions, tail, state)
        self._state = hidden.state
        return apply_head(model.head, hidden.y[:, -1])

    def _recompute(self) -> Float[Tensor, "b n"]:
        """The logits from all steps of the window; no output depends on the action that is still unknown."""
        model = self._model
        length = len(self._returns)
        returns = torch.stack(tuple(self._returns), 1)
        observations = torch.stack(tuple(self._observations), 1)
        actions = list(self._actions)[len(self._actions) - length + 1 :]
        actions.append(model.no_actions(len(returns)))
        timesteps = self._timesteps(len(returns), length)
        logits: Tensor = model(returns, observations, torch.stack(actions, 1), timesteps=timesteps).logits
        return logits[:, -1]

    def _timesteps(self, rows: int, count: int) -> Int[Tensor, "b l"]:
        """The numbers of the last `count` steps, counted from the beginning of the episode."""
        numbers = torch.arange(self._num_steps - count, self._num_steps, device=self._model.device)
        return numbers.expand(rows, -1)
