"""Opening pairs of texts: split, tokenized into shards once, then read as batches of pairs of similar length."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np

from manyformer.batches import TextUnits
from manyformer.config import PairsData
from manyformer.data.data_paths import NORMALIZATION_CORPUS
from manyformer.data.kind import register
from manyformer.data.length_buckets import LengthBuckets, PairDataset
from manyformer.data.opened import EvaluationData, EvaluationPath, LengthLimit, path_name, read_examples
from manyformer.data.pair_tables import RowTable, open_table
from manyformer.data.saved_tokenizers import TokenizerPair, borrowed_tokenizers, train_tokenizer
from manyformer.data.splits import PathOrPaths, Splits
from manyformer.data.table_files import TableRow
from manyformer.data.table_pipeline import TablePipeline, examples_of_rows, training_rows
from manyformer.data.token_shards import ShardWriter, TokenShard, shard_units
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError

# The share of the default corpus that is held out for testing, besides validation.
_TEST_SHARE = 0.02


def _borrowed_pair(run: str, *, is_shared: bool) -> TokenizerPair:
    """The tokenizers of both sides of a run or a saved model. Raises UserError where two are one or one is two."""
    source, target, _ = borrowed_tokenizers(run)
    # the tokenizers of an imported model differ in the special tokens around a text alone
    vocabularies = [side.content().get("tokenizers", side.content()) for side in (source, target)]
    if is_shared != (vocabularies[0] == vocabularies[1]):
        state, needed = ("two vocabularies", "false") if is_shared else ("one vocabulary for both sides", "true")
        raise UserError(f"data.tokenizer_of: {run} has {state}, so data.shared must be {needed}")
    return TokenizerPair(source, target)


class PairsPipeline(TablePipeline[PairsData]):
    """Pairs for an encoder-decoder; a batch is bounded by the padded tokens of the longer side."""

    section = PairsData
    forms = ("pairs",)
    sides = ("source", "target")
    prepared_settings = ("tokenizer", "vocab", "shared")
    title = "pairs"
    noun = "pair"
    unit = "tokens on a side"

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RowTable]:
        keys = (self.data.source, self.data.target)
        return [open_table(paths, keys, self.sides, self.request.cache, header=self.data.header)]

    def split(self) -> Splits[RowTable]:
        splits = super().split()
        if self.data.test is None and self.data.path == NORMALIZATION_CORPUS:
            splits.shares["test"] = min(_TEST_SHARE, (1 - sum(splits.shares.values())) / 2)
        return splits

    def train_tokenizers(self, splits: Splits[RowTable]) -> TokenizerPair:
        data = self.data
        if data.tokenizer_of is not None:
            return _borrowed_pair(data.tokenizer_of, is_shared=data.shared)
        if data.shared:
            texts = chain.from_iterable(row.cells for row in training_rows(splits))
            tokenizer = train_tokenizer(data.tokenizer, texts, data.vocab)
            return TokenizerPair(tokenizer, tokenizer)

        def train(side: int) -> Tokenizer:
            return train_tokenizer(data.tokenizer, (row.cells[side] for row in training_rows(splits)), data.vocab)

        return TokenizerPair(train(0), train(1))

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        source, target = ([row.cells[side] for row in rows] for side in (0, 1))
        source_ids = self.tokenizers.source.encode_many(source)
        target_ids = self.tokenizers.target.encode_many(target)
        for text, ids in zip(source, source_ids, strict=True):
            writers[0].add(np.append(ids, self.tokenizers.source.eos), starts_document=True, text=text)
        bos = self.tokenizers.target.bos
        eos = self.tokenizers.target.eos
        for text, ids in zip(target, target_ids, strict=True):
            writers[1].add(np.concatenate([[bos], ids, [eos]]), starts_document=True, text=text)
        return [max(len(first) + 1, len(second) + 1) for first, second in zip(source_ids, target_ids, strict=True)]

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, self.tokenizers.target.vocab

    def dataset(self, shards: Sequence[TokenShard]) -> PairDataset:
        return PairDataset(*shards, tokenizers=self.tokenizers)

    def units(self, shards: Sequence[TokenShard]) -> TextUnits:
        return shard_units(shards[1])

    def text(self, shards: Sequence[TokenShard]) -> TokenShard:
        return shards[0]

    def required_keywords(self) -> dict[str, int]:
        keywords = super().required_keywords()
        if self.data.shared:
            return keywords
        return {**keywords, "source_vocab": self.tokenizers.source.vocab}

    def held_out(self, split: str | None) -> EvaluationData:
        evaluation = super().held_out(split)
        return evaluation._replace(examples=tuple(read_examples(self.request.cache, evaluation.name)))

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        rows = self.rows_of_file(path)
        return self.evaluation_data(path_name(path), self.write_rows(rows))._replace(examples=examples_of_rows(rows))

    def length_limits(self, plans: Mapping[str, LengthBuckets]) -> Iterator[LengthLimit]:
        remedy = "leave such pairs out with data.max_length, or build a longer model"
        yield LengthLimit(plans["train"].max_length, "the longest training pair", remedy)
        for name, plan in plans.items():
            if name != "train":
                index = int(plan.examples.lengths.argmax())
                example = next(islice(read_examples(self.request.cache, name), index, None))
                remedy = "no held-out pair is left out: build a longer model or shorten the text"
                yield LengthLimit(plan.max_length, f"the longest {name} pair ({example.location})", remedy)

    def vocab_text(self) -> str:
        size = super().vocab_text()
        if self.data.shared:
            return f"{size}, shared by both sides"
        return f"{self.tokenizers.source.vocab:,} (source) and {size} (target)"


PAIRS = register(PairsPipeline.limited_kind())
