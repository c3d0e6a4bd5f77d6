"""Opening running text: read, divided, tokenized into shards once, then rows of equal length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from manyformer.config import TextData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.epochs import HeldOutBatches, TextUnits
from manyformer.data.holdout import DocumentPiece, HoldoutSplitter, TextSurvey, survey
from manyformer.data.lanes import LaneLayout
from manyformer.data.neighbour_tables import lookups_of
from manyformer.data.opened import LengthLimit, OpenedData, human_amount
from manyformer.data.row_layouts import DocumentLayout, RowLayout, WindowLayout
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.text_epochs import BatchMaker, MaskedBatches, NextTokenBatches, TextPlan
from manyformer.data.text_sources import TextPart, TextSource, text_sources
from manyformer.data.token_shards import ShardWriter, TokenShard, writing_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError

LogFn = Callable[[str], None]
# More text does not make a better vocabulary of byte pairs, and takes memory.
LEARNED_FROM = 64_000_000
# Characters tokenized in one call.
_BLOCK = 1 << 20


class TextSplits(NamedTuple):
    """The sources of each split; without any for a split, `shares` of the training text are held out for it."""

    sources: dict[str, list[TextSource]]
    shares: dict[str, float]


def open_text(data: TextData, task: str, *, batch_tokens: int, cache: Path, seed: int, say: LogFn) -> OpenedData:
    """Text for a language model (task "language-model") or a masked one ("masked")."""
    texts = _texts(data, cache)
    stamps = {name: [source.stamp() for source in sources] for name, sources in texts.sources.items()}
    asked = {"kind": "text", "tokenizer": data.tokenizer, "vocab": data.vocab, "shares": texts.shares, "stamps": stamps}
    asked["library"] = tokenizers.__version__
    ready = load_or_prepare(cache, asked, lambda: _make(data, texts, cache, say))
    _refuse_little(ready.shards, batch_tokens, data.length)
    plans = {name: _plan(shard, data, task, ready, batch_tokens) for name, shard in ready.shards.items()}
    units = {name: None if task == "masked" else _units(shard) for name, shard in ready.shards.items()}
    held = {name: HeldOutBatches(plan.fixed(), units[name]) for name, plan in plans.items() if name != "train"}
    return OpenedData(
        task=task,
        tokenizers=ready.tokenizers,
        train=Sampler(plans["train"], seed),
        valid=held["valid"],
        test=held.get("test"),
        lines=tuple(_lines(data, ready)),
        spans=(LengthLimit(data.length, "a row (data.length)", "set data.length to that or less"),),
        cache=cache,
    )


def _texts(data: TextData, cache: Path) -> TextSplits:
    sources = {"train": text_sources(data.path, data.column, cache)}
    shares = {}
    if isinstance(data.valid, float):
        shares["valid"] = data.valid
    else:
        sources["valid"] = text_sources(data.valid, data.column, cache)
    if data.test is not None:
        sources["test"] = text_sources(data.test, data.column, cache)
    elif data.path == "stdlib" and isinstance(data.valid, float):
        shares["test"] = min(data.valid, (1 - data.valid) / 2)
    return TextSplits(sources, shares)


def _make(data: TextData, texts: TextSplits, cache: Path, say: LogFn) -> PreparationResult:
    surveys = {name: survey(sources) for name, sources in texts.sources.items()}
    for name, found in surveys.items():
        if not found.lengths.sum():
            raise UserError(
                f"there is no text at all in {', '.join(source.name for source in texts.sources[name][:3])}"
            )
    characters = int(surveys["train"].lengths.sum())
    holdout = HoldoutSplitter(surveys["train"].lengths, texts.shares)
    say(f"preparing {human_amount(characters, 'characters')} of text ({data.tokenizer} tokens)")
    tokenizer = Tokenizer.train(data.tokenizer, _learned(texts, holdout, characters, data.tokenizer), data.vocab)
    names = list(dict.fromkeys(["train", *texts.shares, *texts.sources]))
    with writing_shards(cache, names, tokenizer.vocab) as writers:
        for piece in _blocks(_pieces(texts, holdout), lambda piece: len(piece.part.text)):
            _add(writers.shards, piece, tokenizer)
    counts = {"documents": sum(len(found.lengths) for found in surveys.values()), "whole": holdout.by_document}
    return PreparationResult(TokenizerPair(tokenizer, tokenizer), writers.facts, _hashes(surveys.values()), counts)


def _parts(sources: Iterable[TextSource]) -> Iterator[TextPart]:
    for source in sources:
        yield from source.parts()


def _pieces(texts: TextSplits, holdout: HoldoutSplitter) -> Iterator[DocumentPiece]:
    yield from holdout.divide(_parts(texts.sources["train"]))
    for name, sources in texts.sources.items():
        if name != "train":
            yield from (DocumentPiece(name, part) for part in _parts(sources))


def _learned(texts: TextSplits, holdout: HoldoutSplitter, characters: int, kind: str) -> Iterator[str]:
    training = (p.part.text for p in holdout.divide(_parts(texts.sources["train"])) if p.split == "train")
    # Characters must all be seen; of byte pairs a sample spread over the text is enough.
    return islice(training, 0, None, max(1, characters // LEARNED_FROM) if kind == "bpe" else 1)


def _blocks(pieces: Iterable[DocumentPiece], size: Callable[[DocumentPiece], int]) -> Iterator[list[DocumentPiece]]:
    block: list[DocumentPiece] = []
    total = 0
    for piece in pieces:
        block.append(piece)
        total += size(piece)
        if total >= _BLOCK:
            yield block
            block, total = [], 0
    yield block


def _add(shards: dict[str, ShardWriter], block: list[DocumentPiece], tokenizer: Tokenizer) -> None:
    for (name, part), ids in zip(block, tokenizer.encode_many([piece.part.text for piece in block]), strict=True):
        bos, eos = [tokenizer.bos] * part.begins, [tokenizer.eos] * part.ends
        whole = np.concatenate([np.array(bos, np.int32), ids, np.array(eos, np.int32)])
        shards[name].add(whole, begins=part.begins, text=part.text)


def _hashes(surveys: Iterable[TextSurvey]) -> dict[str, str]:
    return {name: text for found in surveys for name, text in found.hashes.items()}


def _plan(shard: TokenShard, data: TextData, task: str, ready: PreparedData, batch_tokens: int) -> TextPlan:
    masked = task == "masked"
    finish: BatchMaker = MaskedBatches(data.masking, ready.tokenizers.target.vocab) if masked else NextTokenBatches()
    rows = max(1, batch_tokens // data.length)
    layout = layout_of(data, shard, rows, shifted=not masked)
    known = f"{shard.facts.sha256[:16]}-{data.packing}-{data.length}"
    return TextPlan(layout, rows, finish, known, None if masked else lookups_of(data.neighbours, shard))


def layout_of(data: TextData, shard: TokenShard, rows: int, *, shifted: bool) -> RowLayout:
    """How `shard` is put into batches of `rows` rows."""
    if data.packing == "lanes":
        return LaneLayout(shard, data.length, rows, shifted=shifted)
    shape: type[WindowLayout] | type[DocumentLayout] = WindowLayout if data.packing == "stream" else DocumentLayout
    return shape(shard, data.length, shifted=shifted)


def _refuse_little(shards: dict[str, TokenShard], batch_tokens: int, length: int) -> None:
    if batch_tokens < length:
        raise UserError(
            f"batch.tokens is {batch_tokens}, less than one row of {length} (data.length); set it to {length} or more"
        )
    train = shards["train"].facts.tokens
    if train < batch_tokens:
        raise UserError(
            f"the training text has {train:,} tokens, fewer than one batch of {batch_tokens:,} (batch.tokens); "
            "give more text or set batch.tokens lower"
        )
    for name, shard in shards.items():
        if shard.facts.tokens < 2:
            raise UserError(f"data.{name} holds no text; hold out a larger fraction or give a path")


def _units(shard: TokenShard) -> TextUnits:
    # Every token but the one that begins a document is a target.
    return TextUnits(shard.facts.tokens - shard.facts.documents, shard.facts.characters, shard.facts.bytes)


def _lines(data: TextData, ready: PreparedData) -> list[str]:
    places: Sequence[str] = [data.path] if isinstance(data.path, str) else data.path
    names = {"stdlib": f"the source text of Python {python_version()}'s standard library", "-": "standard input"}
    documents, vocab = ready.counts["documents"], ready.tokenizers.target.vocab
    where = ", ".join(names.get(place, place) for place in places)
    lines = [
        f"text: {where}; {documents:,} document{'s' * (documents != 1)}, {data.tokenizer} tokens, vocabulary {vocab:,}"
    ]
    for name, shard in ready.shards.items():
        facts: Any = shard.facts
        lines.append(f"{name}: {human_amount(facts.tokens, 'tokens')}, {human_amount(facts.characters, 'characters')}")
    rows = {
        "documents": "packed documents that cannot see each other",
        "stream": "documents end to end",
        "lanes": "each going on where it ended in the batch before",
    }
    lines.append(f"rows of {data.length} tokens: {rows[data.packing]}")
    return lines
