"""Letting a model write whose tokens leave early: under any threshold, and what became of the layers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyformer.depth.early_exit_stack import EarlyExit
from manyformer.depth.exit_rules import NeverExit, ThresholdExitRule
from manyformer.errors import UserError
from manyformer.generate import Decoding, generate
from manyformer.generate.decode_plan import sides
from manyformer.generate.prompts import left_padded, read_prompts, right_padded, specials
from manyformer.models import EncoderDecoder, LanguageModel, Model

ThresholdValues = float | Sequence[float]

ROWS = 32
"""Rows that are written together."""


def stack_of(model: Model) -> EarlyExit:
    """The stack that tokens may leave early. Raises UserError where there is none."""
    body = (
        model.body if isinstance(model, LanguageModel) else model.decoder if isinstance(model, EncoderDecoder) else None
    )
    if not isinstance(body, EarlyExit):
        raise UserError(
            f"no token leaves this {model.spec.recipe} early; mf.early_exit wraps a model, or train one of calm, "
            "depth-adaptive-transformer, depth-adaptive-lm, early-exit-lm, early-exit-seq2seq"
        )
    return body


@contextmanager
def exit_threshold(model: Model, threshold: ThresholdValues | None) -> Iterator[None]:
    """Inside, tokens leave at this threshold, a list of one for each layer but the last, or never (None).

    Raises UserError where a threshold means nothing.
    """
    stack = stack_of(model)
    rule = stack.rule
    try:
        if threshold is None:
            stack.rule = NeverExit()
        else:
            stack.rule = at_threshold(stack, threshold)
        yield
    finally:
        stack.rule = rule


def at_threshold(stack: EarlyExit, threshold: ThresholdValues) -> ThresholdExitRule:
    """The stack's rule with another threshold, its weights being the same."""
    import copy

    if not isinstance(stack.rule, ThresholdExitRule):
        raise UserError(f"a {type(stack.rule).__name__} rule knows no threshold: it leaves where it foretells")
    values = (float(threshold),) * (stack.depth - 1) if isinstance(threshold, float | int) else tuple(threshold)
    if len(values) != stack.depth - 1:
        raise UserError(f"{len(values)} thresholds, and {stack.depth - 1} layers to leave after")
    other = copy.copy(stack.rule)
    other.values = values
    return other


class DecodedTexts(NamedTuple):
    """What was written, the tokens of it in a second, and how many layers each took on average, the end left out."""

    texts: list[str]
    tokens: list[list[int]]
    tokens_per_second: float
    layers: float


@dataclass(frozen=True)
class DecodingWorkload:
    """What a model is to go on from: sources to translate, or beginnings of texts, `max_new` tokens at most."""

    model: Model
    prompts: Sequence[str]
    max_new: int | None = None
    rows: int = ROWS

    def write(self, threshold: ThresholdValues | None) -> DecodedTexts:
        """Greedily, tokens leaving at this threshold, or never (None)."""
        with exit_threshold(self.model, threshold):
            return self.decode_with_own_rule()

    def decode_with_own_rule(self) -> DecodedTexts:
        """Greedily, by the model's own rule."""
        decoding = Decoding(max_new=self.max_new)
        # alike in length, so that none waits for another
        order = sorted(range(len(self.prompts)), key=lambda number: len(self.prompts[number]))
        prompts = [self.prompts[number] for number in order]
        found = generate(self.model, prompts, decoding=decoding, batch=self.rows)  # type: ignore[arg-type]
        layers = self._layers(prompts, found.tokens)
        texts, tokens = [""] * len(order), [[0]] * len(order)
        for number, text, ids in zip(order, found.texts, found.tokens):
            texts[number], tokens[number] = text, ids
        return DecodedTexts(texts, tokens, found.stats.tokens_per_second, layers)

    def _layers(self, prompts: Sequence[str], tokens: Sequence[list[int]]) -> float:
        total, count = 0, 0
        for first in range(0, len(prompts), self.rows):
            part = slice(first, first + self.rows)
            for depth in depths(self.model, prompts[part], tokens[part]):
                total, count = total + sum(depth), count + len(depth)
        return total / max(1, count)


@torch.inference_mode()
def depths(model: Model, prompts: Sequence[str], tokens: Sequence[list[int]]) -> list[list[int]]:
    """After which layer each of the written tokens left, told by one pass over all of them, without the cache."""
    words = sides(model.tokenizer)
    found: list[Tensor] = []

    def watch(module: nn.Module, name: str, value: Tensor) -> None:
        if name == "depth":
            found.append(value)

    device = model.device
    rows = read_prompts(list(prompts), words.read, source=isinstance(model, EncoderDecoder))
    if isinstance(model, EncoderDecoder):
        source = right_padded(rows, device)
        begin = specials(model, words.write, Decoding()).begin or 0
        # what leaves where a token is read says the next one
        target = right_padded([[begin, *row[:-1]] for row in tokens], device)
        model(source.clamp(min=0), target.clamp(min=0), _segments(source), _segments(target), watch=watch)
        return [depth[: len(row)] for depth, row in zip(found[0].tolist(), tokens)]
    assert isinstance(model, LanguageModel)
    whole = left_padded([prompt + row[:-1] for prompt, row in zip(rows, tokens)], device)
    model(whole.clamp(min=0), _segments(whole), watch=watch)
    return [depth[len(depth) - len(row) :] for depth, row in zip(found[0].tolist(), tokens)]


def _segments(tokens: Tensor) -> Tensor:
    return torch.where(tokens < 0, -1, 0)
