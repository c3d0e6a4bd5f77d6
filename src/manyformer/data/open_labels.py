"""Opening labelled texts: split, tokenized into shards once, then read as batches of texts of similar length."""

from collections.abc import Iterator, Sequence
from itertools import tee
from pathlib import Path

import numpy as np

from manyformer.config import LabelsData
from manyformer.data.hub import is_hub_dataset
from manyformer.data.kind import OpenRequest, register
from manyformer.data.opened import UnlabelledData, UnlabelledInput
from manyformer.data.padded_examples import LabelledDataset
from manyformer.data.pair_tables import open_table
from manyformer.data.piped_input import STDIN, data_path, stdin_lines
from manyformer.data.saved_tokenizers import TokenizerPair, class_id
from manyformer.data.table_files import TableRow, is_jsonl
from manyformer.data.tabular_text_pipeline import TabularTextPipeline
from manyformer.data.text_files import read_lines
from manyformer.data.token_shards import ShardWriter, TokenShard


class LabelsPipeline(TabularTextPipeline[LabelsData]):
    """Labelled texts for a classifier."""

    section = LabelsData
    forms = ("labelled",)
    sides = columns = ("text", "label")
    texts = 1
    title, noun = "texts", "text"

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
        return LabelledDataset(*shards, pad=self.tokenizers.source.pad)


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
