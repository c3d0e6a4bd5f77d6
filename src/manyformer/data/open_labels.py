"""Opening labelled texts: split, tokenized into shards once, then read as batches of texts of similar length."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import tee
from pathlib import Path

import numpy as np

from manyformer.config import LabelsData
from manyformer.data.hub import is_hub_dataset
from manyformer.data.kind import OpenRequest, register
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.opened import (
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    UnlabelledData,
    UnlabelledInput,
    path_name,
    read_examples,
)
from manyformer.data.padded_examples import LabelledDataset
from manyformer.data.pair_tables import RowTable, open_table
from manyformer.data.piped_input import STDIN, data_path, stdin_lines
from manyformer.data.saved_tokenizers import TokenizerPair, class_id
from manyformer.data.splits import PathOrPaths, Splits, path_list
from manyformer.data.table_files import TableRow, is_jsonl
from manyformer.data.table_pipeline import TablePipeline, examples_of_rows, training_rows
from manyformer.data.text_files import read_lines
from manyformer.data.token_shards import ShardWriter, TokenShard
from manyformer.data.tokenizer_kinds import train_tokenizer
from manyformer.errors import UserError


class LabelsPipeline(TablePipeline[LabelsData]):
    """Labelled texts for a classifier."""

    section = LabelsData
    forms = ("labelled",)
    sides = ("text", "label")
    prepared_settings = ("tokenizer", "vocab", "max_length")
    title, noun = "texts", "text"

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RowTable]:
        columns, cache = (self.data.text, self.data.label), self.request.cache
        return [open_table(path, columns, self.sides, cache) for path in path_list(paths)]

    def train_tokenizers(self, splits: Splits[RowTable]) -> TokenizerPair:
        labels = sorted({row.cells[1] for row in training_rows(splits)})
        if len(labels) == 1:
            raise UserError(f"all training texts have the label {labels[0]!r}; a classifier needs at least two labels")
        texts = (row.cells[0] for row in training_rows(splits))
        tokenizer = train_tokenizer(self.data.tokenizer, texts, self.data.vocab)
        return TokenizerPair(tokenizer, tokenizer, tuple(labels))

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> int:
        tokenizer, class_ids = self.tokenizers.source, self.tokenizers.class_ids()
        limit = max(0, self.data.max_length - 2)
        texts = [row.cells[0] for row in rows]
        token_ids = tokenizer.encode_many(texts)
        for text, ids in zip(texts, token_ids, strict=True):
            framed_ids = np.concatenate([[tokenizer.bos], ids[:limit], [tokenizer.eos]])
            writers[0].add(framed_ids, starts_document=True, text=text)
        for row in rows:
            writers[1].add([class_id(class_ids, row.cells[1], row.location)], starts_document=True)
        return sum(len(ids) > limit for ids in token_ids)

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, len(self.tokenizers.labels or ())

    def dataset(self, shards: Sequence[TokenShard]) -> LabelledDataset:
        return LabelledDataset(*shards)

    def held_out(self, split: str | None) -> EvaluationData:
        evaluation = super().held_out(split)
        return evaluation._replace(examples=tuple(read_examples(self.request.cache, evaluation.name)))

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        # as strings alone, so that a label that does not occur in training is an error of the model
        return EvaluationData(path_name(path), None, examples_of_rows(self.rows_of_file(path)))

    def length_limits(self, plans: Mapping[str, LengthBuckets]) -> Iterator[LengthLimit]:
        remedy = "cut such texts with data.max_length, or build a longer model"
        yield LengthLimit(max(plan.max_length for plan in plans.values()), "the longest text", remedy)


def unlabelled_texts(data: LabelsData, tokenizers: TokenizerPair, path: str, request: OpenRequest) -> UnlabelledData:
    """The lines of a text file or of standard input ("-"), or the texts of JSONL or a Hugging Face data set."""
    texts, names = tee(_read_texts(data, path, request))
    return UnlabelledData((UnlabelledInput(name) for name in names), texts=texts)


def _read_texts(data: LabelsData, path: str, request: OpenRequest) -> Iterator[str]:
    if is_hub_dataset(path) or is_jsonl(Path(path)):
        column = data.text if isinstance(data.text, str) else "text"
        return (row.cells[0] for row in open_table(path, (column,), ("text",), request.cache).rows())
    if path == STDIN:
        return stdin_lines()
    return (line.text for line in read_lines(data_path(path, request.cache)))


LABELS = register(LabelsPipeline.data_kind(unlabelled=unlabelled_texts))
