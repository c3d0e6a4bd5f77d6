"""Filling the hidden tokens of rows with a diffusion: all at once, by blocks, or by blocks with a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.inference.denoising.samplers import Sampler, SamplingStep
from manyformer.models import BlockDiffusionLM, DiffusionLM, ModelOutput
from manyformer.nn.core import PADDING_SEGMENT, State

PredictFn = Callable[[Int[Tensor, "b n"]], Float[Tensor, "b n v"]]
"""From tokens, some of which are hidden, to the logits of all of them."""


class Canvas(NamedTuple):
    """Rows of tokens, of which the mask tokens are to be filled, each with the seed of its random numbers.

    They are on a device that has float64, which is the host where that of the model has none.
    `is_forbidden` are the tokens of the vocabulary that are never predicted; `end_tokens` are not predicted before the
    last given token of a row, in whose column `last_given` is."""

    tokens: Int[Tensor, "b l"]
    segments: Int[Tensor, "b l"] | None
    seeds: Sequence[int]
    is_forbidden: Bool[Tensor, " v"]
    end_tokens: tuple[int, ...]
    last_given: Int[Tensor, "b 1"]

    def may_end(self, first: int, stop: int) -> Bool[Tensor, "b n"]:
        """Whether a text may end at each of these columns."""
        return torch.arange(first, stop, device=self.tokens.device) > self.last_given


class FinishedBlocks:
    """The blocks of a text that are filled already; with a cache, also their keys and values."""

    def __init__(self, model: BlockDiffusionLM, canvas: Canvas, *, use_cache: bool) -> None:
        self._model = model
        self._canvas = canvas
        self._state: State = model.init_state(len(canvas.tokens)) if use_cache else None
        self.tokens = canvas.tokens[:, :0]

    def append(self, tokens: Int[Tensor, "b n"]) -> None:
        """Add tokens, of which none is hidden any more: what is cached are the keys of clean ones."""
        start = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        is_last = self.tokens.shape[1] == self._canvas.tokens.shape[1]
        if self._state is not None and tokens.shape[1] and not is_last:
            self._state = self._call(tokens, start, self._state).state

    def logits_after(self, noised: Int[Tensor, "b n"]) -> Float[Tensor, "b n v"]:
        """The logits of the block that follows, which the state after it would not hold."""
        start = self.tokens.shape[1]
        if self._state is not None:
            return self._call(noised, start, self._state).logits
        return self._call(torch.cat([self.tokens, noised], dim=1), 0, None).logits[:, start:]

    def _call(self, tokens: Int[Tensor, "b n"], start: int, state: State) -> ModelOutput:
        segments = self._canvas.segments
        if segments is not None:
            segments = segments[:, start : start + tokens.shape[1]]
        return on_model(self._model, tokens, segments, state)


@dataclass
class Filling:
    """How hidden tokens are filled; `calls` counts the calls of the model."""

    sampler: Sampler
    steps: int | None = None
    block: int | None = None
    temperature: float = 1.0
    calls: int = field(default=0, init=False)

    def fill(self, model: DiffusionLM, canvas: Canvas, *, use_cache: bool = True) -> Int[Tensor, "b l"]:
        """The tokens of a canvas without hidden ones."""
        if isinstance(model, BlockDiffusionLM):
            return self._fill_in_turn(model, canvas, use_cache=use_cache)
        tokens = canvas.tokens
        is_hidden = _hidden(model, canvas)
        first = is_hidden.int().argmax(1, keepdim=True)
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        # blocks are counted from the first hidden token of a row, as those of an answer after its prompt
        size = tokens.shape[1] if self.block is None else self.block
        number = (columns - first) // size
        blocks = int(number[is_hidden].max()) + 1 if bool(is_hidden.any()) else 0
        may_end = canvas.may_end(0, tokens.shape[1])
        for block in range(blocks):
            chosen = is_hidden & (number == block)
            steps = self._steps_of_block(chosen, blocks)
            predict = self._predicts(
                lambda noised: on_model(model, noised, canvas.segments).logits, model, canvas, may_end
            )
            tokens = self._fill_block(tokens, chosen, predict, canvas.seeds, block, steps)
        return tokens

    def _fill_in_turn(self, model: BlockDiffusionLM, canvas: Canvas, *, use_cache: bool) -> Int[Tensor, "b l"]:
        """Fill block after block of a text, each given the finished ones."""
        length = canvas.tokens.shape[1]
        is_hidden = _hidden(model, canvas)
        if not bool(is_hidden.any()):
            return canvas.tokens
        first = int(is_hidden.any(0).int().argmax()) // model.block * model.block
        finished = FinishedBlocks(model, canvas, use_cache=use_cache)
        finished.append(canvas.tokens[:, :first])
        starts = range(first, length, model.block)
        for number, start in enumerate(starts):
            stop = min(start + model.block, length)
            chosen = is_hidden[:, start:stop]
            steps = self._steps_of_block(chosen, len(starts))
            predict = self._predicts(finished.logits_after, model, canvas, canvas.may_end(start, stop))
            tokens = self._fill_block(canvas.tokens[:, start:stop], chosen, predict, canvas.seeds, number, steps)
            finished.append(tokens)
        return finished.tokens

    def _steps_of_block(self, is_hidden: Bool[Tensor, "b n"], blocks: int) -> int:
        hidden = int(is_hidden.sum(1).max())
        wanted = None if self.steps is None else -(-self.steps // blocks)
        return self.sampler.step_count(hidden, wanted)

    def _predicts(
        self, logits: PredictFn, model: DiffusionLM, canvas: Canvas, may_end: Bool[Tensor, "b n"]
    ) -> PredictFn:
        """`logits` without the tokens that must not be predicted."""

        def predict(noised: Int[Tensor, "b n"]) -> Float[Tensor, "b n v"]:
            self.calls += 1
            allowed = model.token_logits(logits(noised)).double().masked_fill(canvas.is_forbidden, -torch.inf)
            for end in canvas.end_tokens:
                allowed[..., end] = torch.where(may_end, allowed[..., end], -torch.inf)
            return allowed

        return predict

    def _fill_block(
        self,
        tokens: Int[Tensor, "b n"],
        is_hidden: Bool[Tensor, "b n"],
        predict: PredictFn,
        seeds: Sequence[int],
        block: int,
        steps: int,
    ) -> Int[Tensor, "b n"]:
        """The tokens without the hidden ones, after at most so many steps."""
        logits = None
        for step in range(steps):
            if not bool(is_hidden.any()):
                break
            draws = _draw(seeds, block, step, tokens.shape[1]).to(tokens.device)
            # the model is not told the time: while nothing changes, neither do its predictions (MDLM's cache)
            if logits is None:
                logits = predict(tokens)
            proposals = _choose(logits, draws[..., 0], self.temperature)
            confidence = logits.softmax(-1).gather(-1, proposals[..., None])[..., 0]
            accepted = self.sampler.accept(SamplingStep(is_hidden, draws[..., 1], confidence, step, steps))
            if bool(accepted.any()):
                tokens = torch.where(accepted, proposals, tokens)
                is_hidden = is_hidden & ~accepted
                logits = None
        return tokens


def on_model(
    model: DiffusionLM, tokens: Int[Tensor, "b n"], segments: Int[Tensor, "b n"] | None, *state: State
) -> ModelOutput:
    """The output for tokens of another device, whose logits come back to it."""
    segments = None if segments is None else segments.to(model.device)
    output: ModelOutput = model(tokens.to(model.device), segments, *state)
    return output._replace(logits=output.logits.to(tokens.device))


def _hidden(model: DiffusionLM, canvas: Canvas) -> Bool[Tensor, "b l"]:
    is_hidden = canvas.tokens == model.mask_token
    if canvas.segments is None:
        return is_hidden
    return is_hidden & (canvas.segments != PADDING_SEGMENT)


def _draw(seeds: Sequence[int], block: int, step: int, columns: int) -> Float[Tensor, "b n 2"]:
    """Two uniform numbers for each token, which depend on the seed of the row, on its block, step and column alone."""
    rows = [np.random.default_rng((seed, block, step)).random((columns, 2)) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


def _choose(logits: Float[Tensor, "b n v"], draws: Float[Tensor, "b n"], temperature: float) -> Int[Tensor, "b n"]:
    """A token for each number from 0 to 1, of the distribution of the logits, which are of float64."""
    if temperature == 0:
        return logits.argmax(-1)
    # Gumbel noise of float32 would cut off the tails (Zheng et al. 2024, arXiv:2409.02908)
    cumulative = (logits / temperature).softmax(-1).cumsum(-1)
    chosen = torch.searchsorted(cumulative, draws[..., None] * cumulative[..., -1:], right=True)[..., 0]
    return chosen.clamp(max=logits.shape[-1] - 1)
