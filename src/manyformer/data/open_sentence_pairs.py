"""Opening labelled pairs of sentences: both in one row, tokenized into shards once, read as batches of like length."""

from collections.abc import Sequence

from manyformer.config import SentencePairsData
from manyformer.data.kind import OpenRequest, register
from manyformer.data.opened import UnlabelledData
from manyformer.data.padded_examples import SentencePairDataset
from manyformer.data.saved_tokenizers import TokenizerPair, class_id
from manyformer.data.table_files import TableRow
from manyformer.data.tabular_text_pipeline import TabularTextPipeline
from manyformer.data.token_shards import ShardWriter, TokenShard
from manyformer.data.unlabelled_tables import open_unlabelled, unlabelled_rows
from manyformer.two_texts import frame_pair


class SentencePairsPipeline(TabularTextPipeline[SentencePairsData]):
    """Pairs of sentences for a classifier."""

    section = SentencePairsData
    forms = ("labelled",)
    sides = ("tokens", "parts", "classes")
    columns = ("first", "second", "label")
    texts = 2
    title, noun = "sentence pairs", "pair"

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        tokenizer, class_ids = self.tokenizers.source, self.tokenizers.class_ids()
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
