"""What needs no model on the held-out data of a run, beside which the run's score can be read."""

import lzma
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, cast

import numpy as np

from manyformer.base.type_aliases import FloatArray, IntArray
from manyformer.config import RunConfig
from manyformer.data import OpenedData
from manyformer.data.generated.synthetic_floors import guess_floors
from manyformer.data.pipeline.kind import no_log
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch, ClassificationBatch
from manyformer.recipes import get_recipe
from manyformer.training import TrainResult
from manyformer.training.build_model import open_run_data
from manyformer.training.validation import validation_batches

COUNTED_TOKENS = 4_000_000
"""Pairs of tokens are counted in about so many of the training text, a second's work."""

COMPRESSED_TOKENS = 300_000
"""At most so many tokens of the held-out text are compressed, about a second's work."""

DISCOUNT = 0.75
"""What absolute discounting (Ney et al. 1994) takes from the count of each pair, for pairs that were never seen."""


class TextBaselines(NamedTuple):
    """What a token of held-out text costs without a model, in nats: known is how often each token occurs in the
    training text, or how often each follows another.

    `xz` are the bits that the compressor needs for a byte of the same text, without having seen any other; it and
    `bytes_per_token` are None where tokens encode no text.
    """

    unigram: float
    bigram: float
    bytes_per_token: float | None = None
    xz: float | None = None

    def bits_per_byte(self, nats: float) -> float:
        """Nats per token in bits per byte of text."""
        assert self.bytes_per_token is not None
        return nats / math.log(2) / self.bytes_per_token


def meaning_of_scores(run: RunConfig, result: TrainResult) -> str:
    """What the validation scores of a finished run mean, in words: the same of guesses that need no model.

    Empty for data of which nothing of that kind is known here. Raises UserError where the data cannot be read any more.
    """
    if floors := guess_floors(run.data):
        return floors.summary_line
    form = get_recipe(run.recipe).card.task.variant(run.data.kind).data_forms.get(run.data.kind)
    if form == "next-token" and "loss" in result.scores:
        data = open_run_data(run, result.out, no_log)
        rows = cast(Iterable[CausalLMBatch], validation_batches(data.valid, run.evaluate))
        return _meaning_of_loss(result.scores["loss"], text_baselines(data, rows))
    if form == "labelled" and "accuracy" in result.scores:
        data = open_run_data(run, result.out, no_log)
        examples = cast(Iterable[ClassificationBatch], validation_batches(data.valid, run.evaluate))
        labels = [label for batch in examples for label in batch.labels.tolist()]
        return _meaning_of_accuracy(result.scores["accuracy"], labels)
    return ""


def text_baselines(data: OpenedData, held_out: Iterable[CausalLMBatch]) -> TextBaselines:
    """The baselines of the targets in these batches, by counts of the beginning of the training data."""
    contexts, targets = _pairs(held_out)
    training_batches = cast(Iterable[CausalLMBatch], islice(data.train, data.train.batches))
    counted = _pairs(training_batches, COUNTED_TOKENS)
    # one more of each, so that no token is impossible
    counts = np.bincount(counted.targets, minlength=data.vocab) + 1.0
    unigram = (counts / counts.sum())[targets]
    bigram = _probabilities(contexts, targets, counted, unigram)
    bytes_per_token = None
    xz = None
    if units := data.valid.units:
        bytes_per_token = units.bytes / units.targets
        text = data.target.decode(targets[:COMPRESSED_TOKENS].tolist()).encode()
        xz = 8 * len(lzma.compress(text, preset=9)) / len(text)
    return TextBaselines(-float(np.log(unigram).mean()), -float(np.log(bigram).mean()), bytes_per_token, xz)


class TokenPairs(NamedTuple):
    """Tokens of a text, each with the target that follows it."""

    contexts: IntArray
    targets: IntArray


def _pairs(batches: Iterable[CausalLMBatch], at_most: float = math.inf) -> TokenPairs:
    """The pairs of all batches that begin before `at_most` tokens."""
    contexts: list[IntArray] = []
    targets: list[IntArray] = []
    count = 0
    for batch in batches:
        is_scored = batch.targets != IGNORE_INDEX
        contexts.append(batch.tokens[is_scored].numpy())
        targets.append(batch.targets[is_scored].numpy())
        count += len(contexts[-1])
        if count >= at_most:
            break
    return TokenPairs(np.concatenate(contexts), np.concatenate(targets))


def _probabilities(contexts: IntArray, targets: IntArray, counted: TokenPairs, unigram: FloatArray) -> FloatArray:
    """The probability of each target after its context, by the counts of other pairs."""
    base = int(max(tokens.max() for tokens in (contexts, targets, *counted))) + 1
    codes, counts = np.unique(counted.contexts * base + counted.targets, return_counts=True)
    occurrences = np.bincount(counted.contexts, minlength=base)[contexts]
    successors = np.bincount(codes // base, minlength=base)[contexts]
    pairs = contexts * base + targets
    places = np.minimum(np.searchsorted(codes, pairs), len(codes) - 1)
    count = np.where(codes[places] == pairs, counts[places], 0)
    # what is taken from the counts of pairs goes to all tokens, by how often they occur
    taken = DISCOUNT * successors * unigram
    return np.where(occurrences > 0, (np.maximum(count - DISCOUNT, 0) + taken) / np.maximum(occurrences, 1), unigram)


def _meaning_of_loss(loss: float, baselines: TextBaselines) -> str:
    """A sentence for the loss of a language model."""
    if baselines.bytes_per_token is None:
        score = f"{loss:.2f} nats a token"
        unigram = f"{baselines.unigram:.2f}"
        bigram = f"{baselines.bigram:.2f}"
        compressor = ""
    else:
        score = f"{baselines.bits_per_byte(loss):.2f} bits for each byte (8 bits) of held-out text"
        unigram = f"{baselines.bits_per_byte(baselines.unigram):.2f}"
        bigram = f"{baselines.bits_per_byte(baselines.bigram):.2f}"
        compressor = f", {baselines.xz:.2f} by xz on this text alone"
    text = (
        f"{score}; without a model {unigram} by how often each token occurs, {bigram} by how often it follows the one "
        f"before{compressor}"
    )
    if loss >= baselines.bigram:
        text += "; pairs of tokens still tell more than this model: train it longer"
    return text


def _meaning_of_accuracy(accuracy: float, labels: Sequence[int]) -> str:
    """A sentence for the accuracy of a classifier."""
    ((_, count),) = Counter(labels).most_common(1)
    share = count / len(labels)
    text = f"{accuracy:.1%} of {len(labels):,} held-out examples are right; always the most frequent label: {share:.1%}"
    if accuracy <= share:
        text += ", so the model has learned nothing yet"
    return text
