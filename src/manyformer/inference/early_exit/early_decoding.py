"""Greedy decoding with early exits under any exit threshold: texts, their distances, and where each token exited."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.inference.generate import Decoding, generate
from manyformer.inference.generate.generate import read_write_tokenizers
from manyformer.inference.generate.prompts import pad_left, pad_right, read_prompts, special_tokens
from manyformer.models import Model
from manyformer.models.generative_model import as_generative
from manyformer.models.model import weights_fingerprint
from manyformer.models.tasks import Inputs
from manyformer.models.with_early_exit import find_early_exits
from manyformer.nn.core import ValueRecorder
from manyformer.nn.depth.early_exit_stack import EarlyExit
from manyformer.nn.depth.exit_rules import ExitRule, NeverExit
from manyformer.recipes.parts.registry import task_of

ThresholdValues = float | Sequence[float]
ROWS_PER_BATCH = 32
"""Rows that are decoded in one batch."""


class DecodedTexts(NamedTuple):
    """Decoded texts and token ids, tokens per second, and mean layers per token (the end token not counted)."""

    texts: list[str]
    tokens: list[list[int]]
    tokens_per_second: float
    layers: float


@dataclass(frozen=True)
class DecodingWorkload:
    """Prompts to decode from: sources to translate or beginnings of texts, with at most `max_new` new tokens each."""

    model: Model
    prompts: Sequence[str]
    max_new: int | None = None
    rows: int = ROWS_PER_BATCH

    def decode(self, threshold: ThresholdValues | None) -> DecodedTexts:
        """Decode greedily with exits at this threshold, or without exits (None)."""
        with exit_threshold(self.model, threshold):
            return self.decode_with_own_rule()

    def decode_with_own_rule(self) -> DecodedTexts:
        """Decode greedily with the model's own exit rule."""
        decoding = Decoding(max_new=self.max_new)
        # batches of similar prompt length, so that little padding is decoded
        order = sorted(range(len(self.prompts)), key=lambda index: len(self.prompts[index]))
        prompts = [self.prompts[index] for index in order]
        result = generate(self.model, prompts, decoding=decoding, batch=self.rows)  # type: ignore[arg-type]
        layers = self._mean_exit_layer(prompts, result.tokens)
        # back into the order in which the prompts were given
        _, texts, tokens = zip(*sorted(zip(order, result.texts, result.tokens)))
        return DecodedTexts(list(texts), list(tokens), result.stats.tokens_per_second, layers)

    def _mean_exit_layer(self, prompts: Sequence[str], tokens: Sequence[list[int]]) -> float:
        batches = [slice(start, start + self.rows) for start in range(0, len(prompts), self.rows)]
        rows = [row for batch in batches for row in exit_layers(self.model, prompts[batch], tokens[batch])]
        return sum(map(sum, rows)) / max(1, sum(map(len, rows)))


@torch.inference_mode()
def exit_layers(model: Model, prompts: Sequence[str], tokens: Sequence[list[int]]) -> list[list[int]]:
    """The layer after which each generated token exited, from one forward pass over all of them without a cache."""
    tokenizers = read_write_tokenizers(model.tokenizer)
    # the stack reports the exit of each token by itself, so that no layer is looked into
    depths = ValueRecorder(early_exit_stack(model), "depth")
    device = model.device
    task = task_of(model)
    rows = read_prompts(list(prompts), tokenizers.read, source=task.takes_source)
    if task.takes_source:
        source = pad_right(rows, device)
        start_id = special_tokens(as_generative(model, "exit early"), tokenizers.write, Decoding()).bos or 0
        # the exit at an input token belongs to the token predicted from it
        target = pad_right([[start_id, *row[:-1]] for row in tokens], device)
        inputs = Inputs(target.clamp(min=0), _segment_ids(target), source.clamp(min=0), _segment_ids(source))
        task.call(model, inputs, watch=depths)
        return [layers[: len(row)] for layers, row in zip(depths.values[0].tolist(), tokens)]
    # the last token of a row is predicted, never fed
    sequences = pad_left([prompt + row[:-1] for prompt, row in zip(rows, tokens)], device)
    task.call(model, Inputs(sequences.clamp(min=0), _segment_ids(sequences)), watch=depths)
    # the prompt's tokens exit, too, but only those that predict new ones count
    return [layers[len(layers) - len(row) :] for layers, row in zip(depths.values[0].tolist(), tokens)]


def _segment_ids(tokens: Tensor) -> Tensor:
    return torch.where(tokens < 0, -1, 0)


def early_exit_stack(model: Model) -> EarlyExit:
    """The model's stack with early exits. Raises UserError where it has none."""
    stack = find_early_exits(model)
    if stack is None:
        raise UserError(
            f"this {model.spec.recipe} has no early exits; wrap the model with mf.early_exit, or train one of calm, "
            "depth-adaptive-transformer, depth-adaptive-lm, early-exit-lm, early-exit-seq2seq"
        )
    return stack


@contextmanager
def exit_threshold(model: Model, threshold: ThresholdValues | None) -> Iterator[None]:
    """Context in which tokens exit at `threshold`: a number, one for each layer but the last, or None for no exits.

    Raises UserError where the model's exit rule has no threshold.
    """
    stack = early_exit_stack(model)
    rule = stack.rule
    if threshold is None:
        stack.rule = NeverExit()
    else:
        stack.rule = rule_at_threshold(stack, threshold)
    try:
        yield
    finally:
        stack.rule = rule


def rule_at_threshold(stack: EarlyExit, threshold: ThresholdValues) -> ExitRule:
    """A copy of the stack's exit rule with another threshold and the same weights."""
    if isinstance(threshold, float | int):
        # the last layer has no exit: every token leaves there
        values = (float(threshold),) * (stack.depth - 1)
    else:
        values = tuple(threshold)
    if len(values) != stack.depth - 1:
        raise UserError(f"{len(values)} thresholds for {stack.depth - 1} layers with an exit; give one for each layer")
    return stack.rule.at_thresholds(values)


def exit_fingerprint(model: Model) -> str:
    """A hash of all that decides where tokens exit and what they become, apart from the threshold."""
    keywords = {name: value for name, value in model.spec.keywords.items() if name != "threshold"}
    identity = [model.spec.recipe, keywords, weights_fingerprint(model)]
    return hashlib.sha256(json_text(identity, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


TextDistance = Literal["rouge-l", "token-f1"]


def rouge_l_distance(text: str, reference: str) -> float:
    """1 - ROUGE-L (Lin 2004), where ROUGE-L is the F1 score of the longest common subsequence of words."""
    a = text.split()
    b = reference.split()
    return _f1_distance(_lcs_length(a, b), len(a), len(b))


def token_f1_distance(text: str, reference: str) -> float:
    """1 - F1 of the words that the texts share in any order (Rajpurkar et al. 2016, without their normalization)."""
    a = text.split()
    b = reference.split()
    return _f1_distance((Counter(a) & Counter(b)).total(), len(a), len(b))


DISTANCES: dict[TextDistance, Callable[[str, str], float]] = {
    "rouge-l": rouge_l_distance,
    "token-f1": token_f1_distance,
}


def _f1_distance(common: int, length_a: int, length_b: int) -> float:
    """1 - F1 of `common` items out of two lists of these lengths; 0 for two empty lists."""
    if length_a + length_b:
        return 1 - 2 * common / (length_a + length_b)
    return 0.0


def _lcs_length(a: list[str], b: list[str]) -> int:
    """The length of the longest common subsequence of `a` and `b`."""
    lengths = [0] * (len(b) + 1)
    for word_a in a:
        diagonal = 0
        for j, word_b in enumerate(b, 1):
            diagonal, lengths[j] = lengths[j], diagonal + 1 if word_a == word_b else max(lengths[j], lengths[j - 1])
    return lengths[-1]
