"""Opening labelled texts and pairs of sentences: split, tokenized once, read as batches of similar length."""

from collections.abc import Iterator, Sequence
from itertools import chain, tee

import numpy as np

from manyformer.config import LabelsData, SentencePairsData
from manyformer.data.findings import TableFindings
from manyformer.data.kind import OpenRequest, register
from manyformer.data.opened import UnlabelledData, UnlabelledInput
from manyformer.data.padded_examples import LabelledDataset, SentencePairDataset
from manyformer.data.pair_tables import RowTable
from manyformer.data.piped_input import STDIN, data_path, stdin_lines
from manyformer.data.saved_tokenizers import TokenizerPair, class_id
from manyformer.data.table_files import TableRow
from manyformer.data.tabular_text_pipeline import TabularTextPipeline, is_table, open_unlabelled, unlabelled_rows
from manyformer.data.text_files import read_lines
from manyformer.data.token_shards import ShardWriter, TokenShard
from manyformer.errors import UserError
from manyformer.two_texts import frame_pair


class LabelsPipeline(TabularTextPipeline[LabelsData]):
    """Labelled texts for a classifier."""

    section = LabelsData
    forms = ("labelled",)
    sides = columns = ("text", "label")
    texts = 1
    title = "texts"
    noun = "text"

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        tokenizer = self.tokenizers.source
        class_ids = self.tokenizers.class_ids()
        limit = max(0, self.data.max_length - 2)
        texts = [row.cells[0] for row in rows]
        token_ids = tokenizer.encode_many(texts)
        for text, ids in zip(texts, token_ids, strict=True):
            framed_ids = np.concatenate([[tokenizer.bos], ids[:limit], [tokenizer.eos]])
            writers[0].add(framed_ids, starts_document=True, text=text)
        for row in rows:
            writers[1].add([class_id(class_ids, row.cells[1], row.location)], starts_document=True)
        return [len(ids) + 2 for ids in token_ids]

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, len(self.tokenizers.labels or ())

    def dataset(self, shards: Sequence[TokenShard]) -> LabelledDataset:
        return LabelledDataset(*shards, pad=self.tokenizers.source.pad)


def unlabelled_texts(data: LabelsData, tokenizers: TokenizerPair, path: str, request: OpenRequest) -> UnlabelledData:
    """The texts of a table, by the reader of training, or the lines of a text file or of standard input ("-").

    A label, where a table has one, is compared alone. A line with tabs is a row of a table if one of its cells is a
    label of the model, at the place of the label."""
    if is_table(path):
        table = open_unlabelled(path, (data.text, data.label), ("text", "label"), data, request)
        return unlabelled_rows(table, request, name=lambda row: row.cells[0], labels=tokenizers.labels)
    if path == STDIN:
        return _labelled_or_plain(stdin_lines(), data, tokenizers, "standard input", request)
    resolved = data_path(path, request.cache)
    lines = (line.text for line in read_lines(resolved))
    return _labelled_or_plain(lines, data, tokenizers, str(resolved), request)


def _labelled_or_plain(
    lines: Iterator[str], data: LabelsData, tokenizers: TokenizerPair, name: str, request: OpenRequest
) -> UnlabelledData:
    """Lines as texts, or as texts and labels between tabs if the first line has a label of the model at its place."""
    text_column, label_column = (
        number if not isinstance(key, int) else key for number, key in enumerate((data.text, data.label))
    )
    first = next(lines, None)
    cells = [] if first is None else first.split("\t")
    if max(text_column, label_column) >= len(cells) or cells[label_column] not in (tokenizers.labels or ()):
        texts, names = tee(() if first is None else chain([first], lines))
        return UnlabelledData((UnlabelledInput(text) for text in names), texts=texts)
    request.log(
        f"{name}: read as a table, since the first line has the label {cells[label_column]!r} after a tab; "
        "labels are compared, and are no part of the texts"
    )
    assert first is not None

    def rows(findings: TableFindings) -> Iterator[TableRow]:
        for number, line in enumerate(chain([first], lines), start=1):
            cells = line.split("\t")
            if not line.strip():
                findings.blank.add(f"{name}:{number}")
                continue
            if max(text_column, label_column) >= len(cells):
                raise UserError(f"{name}:{number}: this line has no label after a tab, as the first line has")
            yield TableRow((cells[text_column], cells[label_column]), f"{name}:{number}")

    return unlabelled_rows(RowTable(name, rows, []), request, name=lambda row: row.cells[0])


LABELS = register(LabelsPipeline.limited_kind(unlabelled=unlabelled_texts))


class SentencePairsPipeline(TabularTextPipeline[SentencePairsData]):
    """Pairs of sentences for a classifier."""

    section = SentencePairsData
    forms = ("labelled",)
    sides = ("tokens", "parts", "classes")
    columns = ("first", "second", "label")
    texts = 2
    title = "sentence pairs"
    noun = "pair"

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        tokenizer = self.tokenizers.source
        class_ids = self.tokenizers.class_ids()
        lengths = []
        first_ids, second_ids = (tokenizer.encode_many([row.cells[side] for row in rows]) for side in (0, 1))
        for row, first, second in zip(rows, first_ids, second_ids, strict=True):
            framed = frame_pair(list(first), list(second), tokenizer, self.data.max_length)
            columns = (framed.tokens, framed.parts, [class_id(class_ids, row.cells[2], row.location)])
            for writer, column in zip(writers, columns, strict=True):
                writer.add(column, starts_document=True)
            lengths.append(framed.uncut_length)
        return lengths

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, 2, len(self.tokenizers.labels or ())

    def dataset(self, shards: Sequence[TokenShard]) -> SentencePairDataset:
        return SentencePairDataset(*shards, pad=self.tokenizers.source.pad)


def unlabelled_pairs(
    data: SentencePairsData, tokenizers: TokenizerPair, path: str, request: OpenRequest
) -> UnlabelledData:
    """The pairs in a TSV, CSV or JSONL file; a label, where there is one, is compared alone."""
    keys = (data.first, data.second, data.label)
    table = open_unlabelled(path, keys, ("first", "second", "label"), data, request)
    return unlabelled_rows(table, request, name=lambda row: "\t".join(row.cells[:2]), texts=2)


PAIRS_OF_SENTENCES = register(SentencePairsPipeline.limited_kind(unlabelled=unlabelled_pairs))
