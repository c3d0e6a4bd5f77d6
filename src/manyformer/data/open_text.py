"""Opening text for language models: split, tokenized into shards once, then read as rows of equal length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from manyformer.batches import TextUnits
from manyformer.config import TextData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.holdout import DocumentPiece, HoldoutSplitter, TextSurvey, survey_sources
from manyformer.data.lanes import LaneLayout
from manyformer.data.neighbour_tables import open_neighbour_table
from manyformer.data.opened import LengthLimit, OpenedData, format_amount
from manyformer.data.row_layouts import DocumentLayout, RowLayout, WindowLayout
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.text_epochs import BatchMaker, MaskedBatches, NextTokenBatches, TextPlan
from manyformer.data.text_sources import TextPart, TextSource, text_sources
from manyformer.data.token_shards import ShardWriter, TokenShard, write_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError
from manyformer.type_aliases import LogFn

# More text does not improve a vocabulary of byte pairs, and takes memory.
MAX_BPE_CHARACTERS = 64_000_000
# Characters tokenized in one call.
_BLOCK_CHARACTERS = 1 << 20


class TextSplits(NamedTuple):
    """The sources of each split; for a split without sources, the fraction in `shares` of training text is held out."""

    sources: dict[str, list[TextSource]]
    shares: dict[str, float]


def open_text(data: TextData, task: str, *, batch_tokens: int, cache: Path, seed: int, log: LogFn) -> OpenedData:
    """Open text for a causal language model (task "language-model") or a masked one ("masked-lm")."""
    splits = _text_splits(data, cache)
    stamps = {name: [source.stamp() for source in sources] for name, sources in splits.sources.items()}
    settings = {
        "kind": "text",
        "tokenizer": data.tokenizer,
        "vocab": data.vocab,
        "shares": splits.shares,
        "stamps": stamps,
    }
    settings["library"] = tokenizers.__version__
    prepared = load_or_prepare(cache, settings, lambda: _prepare(data, splits, cache, log))
    _check_batch_size(prepared.shards, batch_tokens, data.length)
    plans = {name: _text_plan(shard, data, task, prepared, batch_tokens) for name, shard in prepared.shards.items()}
    units = {name: None if task == "masked-lm" else _text_units(shard) for name, shard in prepared.shards.items()}
    held_out = {
        name: HeldOutBatches(plan.fixed_epoch(), units[name]) for name, plan in plans.items() if name != "train"
    }
    return OpenedData(
        task=task,
        tokenizers=prepared.tokenizers,
        train=Sampler(plans["train"], seed),
        valid=held_out["valid"],
        test=held_out.get("test"),
        summary_lines=tuple(_summary_lines(data, prepared)),
        length_limits=(LengthLimit(data.length, "a row (data.length)", "set data.length to that or less"),),
        cache=cache,
    )


def _text_splits(data: TextData, cache: Path) -> TextSplits:
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


def _prepare(data: TextData, splits: TextSplits, cache: Path, log: LogFn) -> PreparationResult:
    surveys = {name: survey_sources(sources) for name, sources in splits.sources.items()}
    for name, text_survey in surveys.items():
        if not text_survey.lengths.sum():
            raise UserError(f"there is no text in {', '.join(source.name for source in splits.sources[name][:3])}")
    characters = int(surveys["train"].lengths.sum())
    holdout = HoldoutSplitter(surveys["train"].lengths, splits.shares)
    log(f"preparing {format_amount(characters, 'characters')} of text ({data.tokenizer} tokens)")
    tokenizer = Tokenizer.train(
        data.tokenizer, _tokenizer_texts(splits, holdout, characters, data.tokenizer), data.vocab
    )
    names = list(dict.fromkeys(["train", *splits.shares, *splits.sources]))
    with write_shards(cache, names, tokenizer.vocab) as writers:
        for piece in _group_pieces(_split_pieces(splits, holdout), lambda piece: len(piece.part.text)):
            _add_pieces(writers.shards, piece, tokenizer)
    counts = {
        "documents": sum(len(text_survey.lengths) for text_survey in surveys.values()),
        "whole": holdout.by_document,
    }
    return PreparationResult(TokenizerPair(tokenizer, tokenizer), writers.facts, _hashes(surveys.values()), counts)


def _all_parts(sources: Iterable[TextSource]) -> Iterator[TextPart]:
    for source in sources:
        yield from source.parts()


def _split_pieces(splits: TextSplits, holdout: HoldoutSplitter) -> Iterator[DocumentPiece]:
    yield from holdout.divide(_all_parts(splits.sources["train"]))
    for name, sources in splits.sources.items():
        if name != "train":
            yield from (DocumentPiece(name, part) for part in _all_parts(sources))


def _tokenizer_texts(splits: TextSplits, holdout: HoldoutSplitter, characters: int, kind: str) -> Iterator[str]:
    training = (p.part.text for p in holdout.divide(_all_parts(splits.sources["train"])) if p.split == "train")
    # Character vocabularies need all of the text; for byte pairs an evenly spread sample is enough.
    return islice(training, 0, None, max(1, characters // MAX_BPE_CHARACTERS) if kind == "bpe" else 1)


def _group_pieces(
    pieces: Iterable[DocumentPiece], size: Callable[[DocumentPiece], int]
) -> Iterator[list[DocumentPiece]]:
    block: list[DocumentPiece] = []
    total = 0
    for piece in pieces:
        block.append(piece)
        total += size(piece)
        if total >= _BLOCK_CHARACTERS:
            yield block
            block, total = [], 0
    yield block


def _add_pieces(shards: dict[str, ShardWriter], block: list[DocumentPiece], tokenizer: Tokenizer) -> None:
    for (name, part), ids in zip(block, tokenizer.encode_many([piece.part.text for piece in block]), strict=True):
        bos, eos = [tokenizer.bos] * part.starts_document, [tokenizer.eos] * part.ends_document
        tokens = np.concatenate([np.array(bos, np.int32), ids, np.array(eos, np.int32)])
        shards[name].add(tokens, starts_document=part.starts_document, text=part.text)


def _hashes(surveys: Iterable[TextSurvey]) -> dict[str, str]:
    return {name: digest for text_survey in surveys for name, digest in text_survey.hashes.items()}


def _text_plan(shard: TokenShard, data: TextData, task: str, prepared: PreparedData, batch_tokens: int) -> TextPlan:
    masked = task == "masked-lm"
    batch_maker: BatchMaker = (
        MaskedBatches(data.masking, prepared.tokenizers.target.vocab) if masked else NextTokenBatches()
    )
    rows = max(1, batch_tokens // data.length)
    layout = make_layout(data, shard, rows, shifted=not masked)
    fingerprint = f"{shard.facts.sha256[:16]}-{data.packing}-{data.length}"
    return TextPlan(
        layout, rows, batch_maker, fingerprint, None if masked else open_neighbour_table(data.neighbours, shard)
    )


def make_layout(data: TextData, shard: TokenShard, rows: int, *, shifted: bool) -> RowLayout:
    """The layout of `shard` in batches of `rows` rows."""
    if data.packing == "contiguous":
        return LaneLayout(shard, data.length, rows, shifted=shifted)
    layout_class: type[WindowLayout] | type[DocumentLayout] = (
        WindowLayout if data.packing == "concat" else DocumentLayout
    )
    return layout_class(shard, data.length, shifted=shifted)


def _check_batch_size(shards: dict[str, TokenShard], batch_tokens: int, length: int) -> None:
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


def _text_units(shard: TokenShard) -> TextUnits:
    # every token except the first of each document is a target
    return TextUnits(shard.facts.tokens - shard.facts.documents, shard.facts.characters, shard.facts.bytes)


def _summary_lines(data: TextData, prepared: PreparedData) -> list[str]:
    paths: Sequence[str] = [data.path] if isinstance(data.path, str) else data.path
    names = {"stdlib": f"the source text of Python {python_version()}'s standard library", "-": "standard input"}
    documents, vocab = prepared.counts["documents"], prepared.tokenizers.target.vocab
    path_text = ", ".join(names.get(path, path) for path in paths)
    lines = [
        f"text: {path_text}; {documents:,} document{'s' * (documents != 1)}, {data.tokenizer} tokens, "
        f"vocabulary {vocab:,}"
    ]
    for name, shard in prepared.shards.items():
        facts: Any = shard.facts
        lines.append(
            f"{name}: {format_amount(facts.tokens, 'tokens')}, {format_amount(facts.characters, 'characters')}"
        )
    packing_texts = {
        "documents": "packed documents that cannot attend to each other",
        "concat": "documents end to end",
        "contiguous": "each continuing the same row of the previous batch",
    }
    lines.append(f"rows of {data.length} tokens: {packing_texts[data.packing]}")
    return lines
