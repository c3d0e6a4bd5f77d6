"""For each task, the scores that fit it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, Batch, ImageClassificationBatch, TaggingBatch
from manyformer.config import ImagesData, LabelsData, RunConfig
from manyformer.core import PADDING_SEGMENT
from manyformer.data import TokenizerPair
from manyformer.data.opened import EvaluationData
from manyformer.errors import UserError
from manyformer.generate import Translator, decoding_from_options
from manyformer.models import EncoderDecoder, ImageClassifier, Model, Tagger, TextClassifier
from manyformer.models.carried_state import CarriedState
from manyformer.scores import (
    ScoreRecord,
    accuracy,
    bits_per_byte,
    bits_per_character,
    bits_per_dimension,
    bleu,
    chrf,
    exact_match,
    f1,
    perplexity,
    ter,
    token_accuracy,
)
from manyformer.tasks import EvaluationSettings


class Ask(NamedTuple):
    """All that a task needs to be scored."""

    model: Model
    tokenizers: TokenizerPair
    run: RunConfig
    material: EvaluationData
    settings: EvaluationSettings
    each: Callable[[float], None]


class Sums(NamedTuple):
    """Over all targets: nats, their number, and how many were likeliest."""

    nats: float
    targets: int
    correct: int


Answer = tuple[list[ScoreRecord], str]


def text(ask: Ask) -> Answer:
    """Perplexity, bits per character and byte (of images: per dimension), token accuracy; each token predicted once."""
    sums, held = _likelihood(ask, upto=1.0), ask.material.batches
    if isinstance(ask.run.data, ImagesData):
        most = [perplexity(sums.nats, sums.targets), token_accuracy(sums.correct, sums.targets)]
        return [bits_per_dimension(sums.nats, sums.targets), *most], f"{sums.targets:,} values of images"
    assert held is not None
    assert held.units is not None
    found = [
        perplexity(sums.nats, sums.targets),
        bits_per_character(sums.nats, held.units.characters),
        bits_per_byte(sums.nats, held.units.bytes),
        token_accuracy(sums.correct, sums.targets),
    ]
    return found, f"{sums.targets:,} tokens in rows of {ask.run.data.row_length}"


def masked(ask: Ask) -> Answer:
    """Perplexity and accuracy of the hidden tokens."""
    sums = _likelihood(ask, upto=1.0)
    return [perplexity(sums.nats, sums.targets), token_accuracy(sums.correct, sums.targets)], (
        f"{sums.targets:,} hidden tokens, the same in every evaluation"
    )


def pairs(ask: Ask) -> Answer:
    """BLEU, chrF, TER and exact matches of translations by beam search; perplexity and accuracy of the references."""
    assert isinstance(ask.model, EncoderDecoder)
    sums, wanted = _likelihood(ask, upto=0.1), [example.target for example in ask.material.examples]
    chosen = ask.settings
    decoding = decoding_from_options(beam=chosen.beam, length_penalty=chosen.length_penalty)
    translate = Translator(ask.model, tokenizer=(ask.tokenizers.source, ask.tokenizers.target), decoding=decoding)
    texts = []
    for answers in translate(example.source for example in ask.material.examples):
        texts.append(answers[0].text or "")
        ask.each(0.1 + 0.9 * len(texts) / len(wanted))
    found = [
        bleu(texts, wanted, tokenize=chosen.tokenize, lowercase=chosen.lowercase),
        chrf(texts, wanted),
        ter(texts, wanted),
        exact_match(texts, wanted),
        perplexity(sums.nats, sums.targets),
        token_accuracy(sums.correct, sums.targets),
    ]
    return found, f"{len(texts):,} translations, beam {chosen.beam}, length penalty {chosen.length_penalty:g}"


def labels(ask: Ask) -> Answer:
    """Accuracy and F1 over classes."""
    assert isinstance(ask.model, TextClassifier)
    examples, names = ask.material.examples, _names(ask)
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].source))
    found = [""] * len(examples)
    for first in range(0, len(order), ROWS):
        numbers = order[first : first + ROWS]
        classes = ask.model(*_rows(ask, [examples[number].source for number in numbers])).logits.argmax(-1)
        for number, chosen in zip(numbers, classes.tolist()):
            found[number] = names[chosen]
        ask.each((first + len(numbers)) / len(order))
    wanted = [example.target for example in examples]
    return [accuracy(found, wanted), f1(found, wanted), f1(found, wanted, average="micro")], f"{len(examples):,} texts"


def tags(ask: Ask) -> Answer:
    """Accuracy and F1 over the labels of words."""
    assert isinstance(ask.model, Tagger)
    assert ask.material.batches is not None
    names, found, wanted = _names(ask), list[str](), list[str]()
    for number, batch in enumerate(ask.material.batches, 1):
        there = _there(batch, ask.model.device)
        assert isinstance(there, TaggingBatch)
        logits = ask.model(there.tokens, there.segments, there.trees).logits
        at = there.targets != IGNORE_INDEX
        found += [names[chosen] for chosen in logits[at].argmax(-1).tolist()]
        wanted += [names[right] for right in there.targets[at].tolist()]
        ask.each(number / len(ask.material.batches))
    return [accuracy(found, wanted), f1(found, wanted)], f"{len(found):,} words, each told the tree of its sentence"


def images(ask: Ask) -> Answer:
    """Accuracy and F1 over the labels of images."""
    assert isinstance(ask.model, ImageClassifier)
    assert ask.material.batches is not None
    names, found, wanted = _names(ask), list[str](), list[str]()
    for number, batch in enumerate(ask.material.batches, 1):
        there = _there(batch, ask.model.device)
        assert isinstance(there, ImageClassificationBatch)
        found += [names[chosen] for chosen in ask.model(there.pixels).logits.argmax(-1).tolist()]
        wanted += [names[right] for right in there.labels.tolist()]
        ask.each(number / len(ask.material.batches))
    return [accuracy(found, wanted), f1(found, wanted), f1(found, wanted, average="micro")], f"{len(found):,} images"


ROWS = 64
"""Texts that are labelled together."""

TASKS: dict[str, Callable[[Ask], Answer]] = {
    "language-model": text,
    "masked-lm": masked,
    "translation": pairs,
    "classification": labels,
    "tagging": tags,
    "image-classification": images,
}


def _likelihood(ask: Ask, *, upto: float) -> Sums:
    assert ask.material.batches is not None
    sums, device = Sums(0.0, 0, 0), ask.model.device
    memory = CarriedState(ask.model, rows_continue=ask.material.batches.rows_continue)
    for number, batch in enumerate(ask.material.batches, 1):
        state = memory.state_for(batch)
        words = {} if state is None else {"state": state}
        scored = ask.model.score(_there(batch, device), **words)
        memory.update(scored)
        sums = Sums(
            sums.nats + float(scored.nll), sums.targets + int(scored.targets), sums.correct + int(scored.correct)
        )
        ask.each(upto * number / len(ask.material.batches))
    return sums


def _there(batch: Batch, device: torch.device) -> Batch:
    return type(batch)(*(None if tensor is None else tensor.to(device) for tensor in batch))


def _names(ask: Ask) -> tuple[str, ...]:
    if ask.tokenizers.labels is None:
        raise UserError("the model was saved without the names of its labels (labels.json), so answers cannot be told")
    return ask.tokenizers.labels


def _rows(ask: Ask, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Texts as the classifier saw them in training, padded at the right."""
    assert isinstance(ask.run.data, LabelsData)
    words, max_length = ask.tokenizers.source, ask.run.data.max_length
    rows = [[words.bos, *words.encode(one)[: max_length - 2], words.eos] for one in texts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [words.pad] * (width - len(row)) for row in rows], device=ask.model.device)
    segments = torch.tensor(
        [[0] * len(row) + [PADDING_SEGMENT] * (width - len(row)) for row in rows], device=ask.model.device
    )
    return tokens, segments
