"""Opening text for language models: split, tokenized into shards once, then read as rows of equal length."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from manyformer.config import TextData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare, load_prepared
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.example_splits import check_fills_batch, shard_units
from manyformer.data.holdout import DocumentPiece, HoldoutSplitter, TextSurvey, survey_sources
from manyformer.data.kind import DataKind, OpenRequest, prepared_split, register
from manyformer.data.lanes import LaneLayout
from manyformer.data.neighbour_tables import open_neighbour_table
from manyformer.data.opened import EvaluationData, EvaluationPath, LengthLimit, OpenedData, format_amount, path_name
from manyformer.data.row_layouts import DocumentLayout, RowLayout, WindowLayout
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.text_epochs import BatchMaker, MaskedBatches, NextTokenBatches, TextPlan
from manyformer.data.text_sources import TextPart, TextSource, text_sources
from manyformer.data.token_shards import ShardWriter, TokenShard, open_shard, write_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError

# More text does not improve a vocabulary of byte pairs, and takes memory.
MAX_BPE_CHARACTERS = 64_000_000
PROMPT_CHARACTERS = 40
"""Length of the held-out text that prompts a sample."""
# Characters tokenized in one call.
_BLOCK_CHARACTERS = 1 << 20


class TextSplits(NamedTuple):
    """The sources of each split; for a split without sources, the fraction in `shares` of training text is held out."""

    sources: dict[str, list[TextSource]]
    shares: dict[str, float]


def open_text(data: TextData, form: str, request: OpenRequest) -> OpenedData:
    """Open text in the form "next-token", for a language model, or "masked", for a masked one."""
    splits = _text_splits(data, request.cache)
    stamps = {name: [source.stamp() for source in sources] for name, sources in splits.sources.items()}
    settings = {
        "kind": "text",
        "tokenizer": data.tokenizer,
        "vocab": data.vocab,
        "shares": splits.shares,
        "stamps": stamps,
    }
    settings["library"] = tokenizers.__version__
    prepared = load_or_prepare(request.cache, settings, lambda: _prepare(data, splits, request))
    _check_batch_size(prepared.shards, request.batch_tokens, data.length)
    vocab = prepared.tokenizers.target.vocab
    held_out = {
        name: _held_out_batches(data, form, shard, vocab, request.batch_tokens)
        for name, shard in prepared.shards.items()
        if name != "train"
    }
    return OpenedData(
        tokenizers=prepared.tokenizers,
        train=Sampler(_text_plan(data, form, prepared.shards["train"], vocab, request.batch_tokens), request.seed),
        valid=held_out["valid"],
        test=held_out.get("test"),
        summary_lines=tuple(_summary_lines(data, prepared)),
        length_limits=(LengthLimit(data.length, "a row (data.length)", "set data.length to that or less"),),
        cache=request.cache,
        required_keywords={"vocab": vocab},
    )


def held_out_text(data: TextData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The rows of a held-out split."""
    name, prepared = prepared_split(open_text, data, form, request, split)
    vocab = prepared.tokenizers.target.vocab
    return EvaluationData(name, _held_out_batches(data, form, prepared.shards[name], vocab, request.batch_tokens))


def text_of_file(
    data: TextData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """The rows of the text in any source of text."""
    shard = write_text_shard(data, tokenizers.source, path, request.cache)
    batches = _held_out_batches(data, form, shard, tokenizers.source.vocab, request.batch_tokens)
    return EvaluationData(path_name(path), batches)


def write_text_shard(data: TextData, tokenizer: Tokenizer, path: EvaluationPath, scratch_dir: Path) -> TokenShard:
    """Tokenize the text at `path` and write it as the shard "text" in the folder `scratch_dir`."""
    with write_shards(scratch_dir, ["text"], tokenizer.vocab) as writers:
        for part in _all_parts(text_sources(path, data.column, scratch_dir)):
            _add_pieces(writers.shards, [DocumentPiece("text", part)], tokenizer)
    facts = writers.facts["text"]
    if not facts.characters:
        raise UserError(f"{path}: there is no text in it")
    return open_shard(scratch_dir, "text", facts)


def sample_prompt(data: TextData, request: OpenRequest) -> str:
    """`def ` for Python's library, otherwise the first whole words of the validation text."""
    if data.path == "stdlib":
        return "def "
    prepared = load_prepared(request.cache)
    assert prepared is not None
    tokens = prepared.shards["valid"].tokens[:PROMPT_CHARACTERS]
    text = prepared.tokenizers.source.decode(tokens)[:PROMPT_CHARACTERS]
    return re.sub(r"^\S*\s+|\s+\S*$", "", text) or text


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


def _prepare(data: TextData, splits: TextSplits, request: OpenRequest) -> PreparationResult:
    surveys = {name: survey_sources(sources) for name, sources in splits.sources.items()}
    for name, text_survey in surveys.items():
        if not text_survey.lengths.sum():
            raise UserError(f"there is no text in {', '.join(source.name for source in splits.sources[name][:3])}")
    characters = int(surveys["train"].lengths.sum())
    holdout = HoldoutSplitter(surveys["train"].lengths, splits.shares)
    request.log(f"preparing {format_amount(characters, 'characters')} of text ({data.tokenizer} tokens)")
    tokenizer = Tokenizer.train(
        data.tokenizer, _tokenizer_texts(splits, holdout, characters, data.tokenizer), data.vocab
    )
    names = list(dict.fromkeys(["train", *splits.shares, *splits.sources]))
    with write_shards(request.cache, names, tokenizer.vocab) as writers:
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


def _text_plan(data: TextData, form: str, shard: TokenShard, vocab: int, batch_tokens: int) -> TextPlan:
    masked = form == "masked"
    batch_maker: BatchMaker = MaskedBatches(data.masking, vocab) if masked else NextTokenBatches()
    rows = max(1, batch_tokens // data.length)
    layout = make_layout(data, shard, rows, shifted=not masked)
    fingerprint = f"{shard.facts.sha256[:16]}-{data.packing}-{data.length}"
    neighbours = None if masked else open_neighbour_table(data.neighbours, shard)
    return TextPlan(layout, rows, batch_maker, fingerprint, neighbours)


def _held_out_batches(data: TextData, form: str, shard: TokenShard, vocab: int, batch_tokens: int) -> HeldOutBatches:
    # masked tokens do not encode a text
    units = None if form == "masked" else shard_units(shard)
    return HeldOutBatches(_text_plan(data, form, shard, vocab, batch_tokens).fixed_epoch(), units)


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
    check_fills_batch(shards["train"].facts.tokens, batch_tokens, "the training text has", "text")
    for name, shard in shards.items():
        if shard.facts.tokens < 2:
            raise UserError(f"data.{name} holds no text; hold out a larger fraction or give a path")


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


TEXT = register(
    DataKind(
        section=TextData,
        forms=("next-token", "masked"),
        open=open_text,
        held_out=held_out_text,
        from_file=text_of_file,
        sample_prompt=sample_prompt,
        cache_is_shared=True,
    )
)
