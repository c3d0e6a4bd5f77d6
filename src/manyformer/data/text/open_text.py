"""Opening text for language models: split, tokenized into shards once, then read as rows of equal length."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from platform import python_version

import numpy as np

from manyformer.base.context_windows import ContextWindows
from manyformer.base.errors import UserError
from manyformer.config import TextData
from manyformer.data.batching.length_buckets import check_fills_batch
from manyformer.data.batching.row_layouts import (
    DocumentLayout,
    LaneLayout,
    RandomWindowLayout,
    RowLayout,
    WindowLayout,
    WindowRows,
)
from manyformer.data.batching.text_epochs import (
    BatchMaker,
    MaskedBatches,
    NextTokenBatches,
    NoisedBatches,
    TextPlan,
    tokens_that_end_sentences,
)
from manyformer.data.pipeline.data_paths import STDIN, STDLIB, is_hub_dataset
from manyformer.data.pipeline.file_pipeline import FilePipeline
from manyformer.data.pipeline.kind import register
from manyformer.data.pipeline.opened import EvaluationPath, LengthLimit, check_holds_row, format_amount, row_limit
from manyformer.data.pipeline.splits import PathOrPaths, Splits, path_list
from manyformer.data.pipeline.summary import EXAMPLES, DataSummary, LengthSummary, kept_example
from manyformer.data.storage.cache_folder import PreparationResult, PreparedData
from manyformer.data.storage.neighbour_tables import open_neighbour_table
from manyformer.data.storage.token_shards import ShardWriter, TokenShard, open_shard, shard_units, write_shards
from manyformer.data.text.table_columns import describe_tables
from manyformer.data.text.text_files import describe_folder, folder_files
from manyformer.data.text.text_preparation import DocumentPiece, HoldoutSplitter, TextSurvey, UnfinishedText
from manyformer.data.text.text_sources import PlainTextSource, TextPart, TextSource, text_sources
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, describe_tokenizer, section_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.batches import TextUnits

# More text does not improve a vocabulary of byte pairs, and takes memory.
MAX_BPE_CHARACTERS = 64_000_000


class TextPipeline(FilePipeline[TextData, TextSource, TextPlan]):
    """Text in the form "next-token", for a language model, "masked", for a masked one, or "noised", for a diffusion."""

    section = TextData
    forms = ("next-token", "masked", "noised")
    prepared_settings = ("tokenizer", "vocab")
    resumes = True

    def open_sources(self, paths: PathOrPaths, split: str) -> list[TextSource]:
        return text_sources(paths, self.data.column, self.request.cache)

    def split(self) -> Splits[TextSource]:
        splits = super().split()
        data = self.data
        if data.test is None and data.path == STDLIB and isinstance(data.valid, float):
            # never more than half of what validation leaves for training
            splits.shares["test"] = min(data.valid, (1 - data.valid) / 2)
        return splits

    def prepare(self, splits: Splits[TextSource], folder: Path) -> PreparationResult:
        data = self.data
        unfinished = UnfinishedText(folder)
        surveys = {name: unfinished.survey(name, sources) for name, sources in splits.sources.items()}
        # checked before the tokenizer is trained, which may take long
        for name, survey in surveys.items():
            if not survey.lengths.sum():
                raise UserError(f"there is no text in {', '.join(source.name for source in splits.sources[name][:3])}")
        characters = int(surveys["train"].lengths.sum())
        holdout = HoldoutSplitter(surveys["train"].lengths, splits.shares)
        self.request.log(f"preparing {format_amount(characters, 'characters')} of text ({describe_tokenizer(data)})")
        # a generator: the text is read once more, and never held as a whole
        texts = (piece.part.text for piece in _split_pieces(splits, holdout, ["train"]) if piece.split == "train")
        # Character vocabularies need all of the text; for byte pairs an evenly spread sample is enough.
        step = 1
        if data.tokenizer == "bpe":
            step = max(1, characters // MAX_BPE_CHARACTERS)
        tokenizer = unfinished.tokenizer(lambda: section_tokenizer(data, islice(texts, 0, None, step)))
        with unfinished.shards(splits.names, tokenizer) as shards:
            if shards.pieces:
                self.request.log(
                    f"continuing after {format_amount(shards.characters, 'characters')}, tokenized earlier"
                )
            # the order of pieces is always the same, so their number says where to go on
            pieces = islice(_split_pieces(splits, holdout, splits.sources), shards.pieces, None)
            for block in _group_pieces(pieces, tokenizer.block_characters):
                _add_pieces(shards.writers, block, tokenizer)
                shards.advance(len(block))
        counts = {"documents": sum(len(survey.lengths) for survey in surveys.values()), "whole": holdout.by_document}
        hashes = {name: digest for survey in surveys.values() for name, digest in survey.hashes.items()}
        summary = _summarize(splits, surveys)
        return PreparationResult(TokenizerPair(tokenizer, tokenizer), shards.facts, hashes, counts, summary)

    def token_limits(self) -> tuple[int, ...]:
        return (self.tokenizers.target.vocab,)

    def write_file(self, path: EvaluationPath) -> list[TokenShard]:
        return [write_text_shard(self.data, self.tokenizers.source, path, self.request.cache)]

    def plan(self, shards: Sequence[TokenShard], split: str) -> TextPlan:
        data = self.data
        batch_tokens = self.request.batch_tokens
        (shard,) = shards
        if split == "train":
            check_holds_row(data.length, batch_tokens)
            check_fills_batch(shard.facts.tokens, batch_tokens, "the training text has", "text")
        if shard.facts.tokens < 2:
            raise UserError(f"data.{split} holds no text; hold out a larger fraction or give a path")
        tokenizer = self.tokenizers.target
        batch_maker: BatchMaker = NextTokenBatches()
        neighbours = None
        if self.form == "noised":
            tokenizer.required_mask("a masked diffusion")
            batch_maker = NoisedBatches(tokenizer)
        elif self.form == "masked":
            tokenizer.required_mask("masked language modelling")
            ends = tokens_that_end_sentences(tokenizer) if data.text_parts == "sentences" else None
            batch_maker = MaskedBatches(data.masking, tokenizer, ends)
        else:
            neighbours = open_neighbour_table(data.neighbours, shard, tokenizer.vocab)
        windows = self.request.windows
        # held-out rows may be windows longer than a batch
        rows = max(1, batch_tokens // (data.length if windows is None else windows.context))
        shifted = self.form == "next-token"
        layout = make_layout(data, shard, rows, pad=tokenizer.pad, shifted=shifted, windows=windows)
        # what decides the batches, so that a checkpoint of other batches is refused
        fingerprint = f"{shard.facts.sha256[:16]}-{data.packing}-{data.length}"
        return TextPlan(layout, rows, batch_maker, fingerprint, neighbours)

    def offered_keywords(self) -> dict[str, int | None]:
        return {"mask_token": self.tokenizers.target.mask}

    def units(self, shards: Sequence[TokenShard]) -> TextUnits | None:
        # masked tokens do not encode a text
        if self.form == "masked":
            return None
        return shard_units(shards[0])

    def text(self, shards: Sequence[TokenShard]) -> TokenShard:
        return shards[0]

    def length_limits(self, plans: Mapping[str, TextPlan]) -> Iterable[LengthLimit]:
        return [row_limit(self.data.length)]

    def describe(
        self, splits: Splits[TextSource], prepared: PreparedData, plans: Mapping[str, TextPlan]
    ) -> Iterator[str]:
        data = self.data
        documents = prepared.counts["documents"]
        vocab = prepared.tokenizers.target.vocab
        names = {STDLIB: f"the source text of Python {python_version()}'s standard library", STDIN: "standard input"}
        path_text = ", ".join(names.get(path, path) for path in path_list(data.path))
        yield (
            f"text: {path_text}; {documents:,} document{'s' * (documents != 1)}, {describe_tokenizer(data)}, "
            f"vocabulary {vocab:,}"
        )
        for folder in filter(Path.is_dir, map(Path, path_list(data.path))):
            if not is_hub_dataset(str(folder)):
                yield describe_folder(folder, folder_files(folder))
        for name, shard in prepared.shards.items():
            characters = format_amount(shard.facts.characters, "characters")
            yield f"{name}: {format_amount(shard.facts.tokens, 'tokens')}, {characters}"
        plain = [source.path for source in splits.sources["train"] if isinstance(source, PlainTextSource)]
        if note := describe_tables(plain if data.path != STDLIB else ()):
            yield note
        packing_texts = {
            "documents": "packed documents that cannot attend to each other",
            "concat": "documents end to end",
            "random": "documents end to end, each row beginning at a random token",
            "contiguous": "each continuing the same row of the previous batch",
        }
        yield f"rows of {data.length} tokens: {packing_texts[data.packing]}"


def _summarize(splits: Splits[TextSource], surveys: Mapping[str, TextSurvey]) -> DataSummary:
    """The summary of the documents."""
    return DataSummary(
        noun="document",
        counts={name: len(survey.lengths) for name, survey in surveys.items()},
        lengths=LengthSummary.of(surveys["train"].lengths, "characters"),
        left_out=tuple(splits.found()),
        examples=tuple(islice(_beginnings(splits.sources["train"]), EXAMPLES)),
        is_part=splits.are_cut_short,
    )


def _beginnings(sources: Iterable[TextSource]) -> Iterator[tuple[str, ...]]:
    """The beginning of each document."""
    for source in sources:
        for part in source.parts():
            if part.starts_document and part.text.strip():
                yield kept_example([part.text.strip()])


def write_text_shard(data: TextData, tokenizer: Tokenizer, path: EvaluationPath, scratch_dir: Path) -> TokenShard:
    """Tokenize the text at `path` and write it as the shard "text" in the folder `scratch_dir`."""
    with write_shards(scratch_dir, ["text"], tokenizer.vocab) as writers:
        for source in text_sources(path, data.column, scratch_dir):
            for part in source.parts():
                _add_pieces(writers.shards, [DocumentPiece("text", part)], tokenizer)
    facts = writers.facts["text"]
    # a file of byte order marks or empty records has shards, and nothing in them
    if not facts.characters:
        raise UserError(f"{path}: there is no text in it")
    return open_shard(scratch_dir, "text", facts)


def make_layout(
    data: TextData, shard: TokenShard, rows: int, *, pad: int, shifted: bool, windows: ContextWindows | None = None
) -> RowLayout:
    """The layout of `shard` in batches of `rows` rows, filled up with `pad`, which are `windows` if these are given."""
    if windows is not None:
        return WindowRows(shard, windows, pad=pad, across_documents=data.packing in ("concat", "random"))
    if data.packing == "contiguous":
        return LaneLayout(shard, data.length, rows, shifted=shifted, pad=pad)
    if data.packing == "concat":
        return WindowLayout(shard, data.length, shifted=shifted)
    if data.packing == "random":
        return RandomWindowLayout(shard, data.length, shifted=shifted)
    return DocumentLayout(shard, data.length, shifted=shifted, pad=pad)


def _split_pieces(
    splits: Splits[TextSource], holdout: HoldoutSplitter, names: Iterable[str]
) -> Iterator[DocumentPiece]:
    """Stream the pieces of the sources of these splits."""
    for name in names:
        parts: Iterator[TextPart] = chain.from_iterable(source.parts() for source in splits.sources[name])
        yield from holdout.divide(parts) if name == "train" else (DocumentPiece(name, part) for part in parts)


def _group_pieces(pieces: Iterable[DocumentPiece], block_characters: int) -> Iterator[list[DocumentPiece]]:
    block: list[DocumentPiece] = []
    total = 0
    for piece in pieces:
        block.append(piece)
        total += len(piece.part.text)
        if total >= block_characters:
            yield block
            block = []
            total = 0
    yield block


def _add_pieces(shards: dict[str, ShardWriter], block: list[DocumentPiece], tokenizer: Tokenizer) -> None:
    for (name, part), ids in zip(block, tokenizer.encode_many([piece.part.text for piece in block]), strict=True):
        # inside a long document there is nothing to add, and no copy to make
        if part.starts_document or part.ends_document:
            bos = [tokenizer.bos] * part.starts_document
            eos = [tokenizer.eos] * part.ends_document
            ids = np.concatenate([np.array(bos, np.int32), ids, np.array(eos, np.int32)])
        shards[name].add(ids, starts_document=part.starts_document, text=part.text)


TEXT = register(TextPipeline.limited_kind(windowed_forms=("next-token",), cache_is_shared=True))
