"""The common part of tables whose rows an encoder reads as text: held-out rows are kept as strings."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from manyformer.batches import AnswerSpanBatch, Batch, ClassificationBatch
from manyformer.config import TabularTextData
from manyformer.core import PADDING_SEGMENT
from manyformer.data.borrowed_tokenizer import section_tokenizer
from manyformer.data.length_buckets import LengthBuckets, SequenceDataset
from manyformer.data.opened import EvaluationData, EvaluationPath, LengthLimit, path_name, read_examples
from manyformer.data.padded_examples import gather_padded
from manyformer.data.pair_tables import RowTable, open_table
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, Splits, path_list
from manyformer.data.table_columns import ColumnKey
from manyformer.data.table_files import TableRow
from manyformer.data.table_pipeline import TablePipeline, examples_of_rows, training_rows
from manyformer.data.token_shards import TokenShard
from manyformer.errors import UserError
from manyformer.two_texts import first_text_roles
from manyformer.type_aliases import IntArray

TabularT = TypeVar("TabularT", bound=TabularTextData)
"""The section of a table of texts."""


class TabularTextPipeline(TablePipeline[TabularT]):
    """Rows of texts for an encoder; `columns` are the settings that name the columns, the texts first."""

    prepared_settings = ("tokenizer", "vocab", "max_length")
    columns: tuple[str, ...]
    texts: int
    """How many of the columns are texts, from which a tokenizer is trained."""
    long_rows = "cut"

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RowTable]:
        keys: list[ColumnKey | None] = [getattr(self.data, column) for column in self.columns]
        cache, header = self.request.cache, self.data.header
        return [open_table(path, keys, self.columns, cache, header=header) for path in path_list(paths)]

    def train_tokenizers(self, splits: Splits[RowTable]) -> TokenizerPair:
        rows = training_rows(splits, required_cells=self.required_cells)
        tokenizer = section_tokenizer(self.data, (cell for row in rows for cell in row.cells[: self.texts]))
        return TokenizerPair(tokenizer, tokenizer, self.label_names(splits))

    def labels_of(self, row: TableRow) -> Sequence[str]:
        return row.cells[-1:] if self.tokenizers.labels is not None else ()

    def label_names(self, splits: Splits[RowTable]) -> tuple[str, ...] | None:
        """The names of the labels, which are in the last column. Raises UserError if there is one alone."""
        labels = sorted({row.cells[-1] for row in training_rows(splits)})
        if len(labels) == 1:
            raise UserError(
                f"all training {self.title} have the label {labels[0]!r}; a classifier needs at least two labels"
            )
        return tuple(labels)

    def held_out(self, split: str | None) -> EvaluationData:
        evaluation = super().held_out(split)
        return evaluation._replace(examples=tuple(read_examples(self.request.cache, evaluation.name)))

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        # as strings alone, so that a label that does not occur in training is an error of the model
        return EvaluationData(path_name(path), None, examples_of_rows(self.rows_of_file(path)))

    def length_limits(self, plans: Mapping[str, LengthBuckets]) -> Iterator[LengthLimit]:
        remedy = "cut such texts with data.max_length, or build a longer model"
        yield LengthLimit(max(plan.max_length for plan in plans.values()), "the longest text", remedy)


class TwoTextDataset(SequenceDataset):
    """Rows of two texts with the part of each token, and a class or the two ends of an answer for each row."""

    def __init__(self, tokens: TokenShard, parts: TokenShard, targets: TokenShard, *, pad: int) -> None:
        assert tokens.facts.tokens == parts.facts.tokens
        assert tokens.facts.documents == targets.facts.documents
        self._tokens, self._parts, self._targets, self._pad = tokens, parts, targets, pad
        self.lengths = self.tie_breakers = tokens.lengths
        self.fingerprint = "-".join(shard.facts.sha256[:12] for shard in (tokens, parts, targets))

    @abstractmethod
    def make_batch(self, indices: IntArray) -> Batch: ...


class SentencePairDataset(TwoTextDataset):
    """Pairs of sentences with a class each."""

    def make_batch(self, indices: IntArray) -> ClassificationBatch:
        tokens, segments = gather_padded(self._tokens, indices, pad=self._pad)
        parts, _ = gather_padded(self._parts, indices, pad=PADDING_SEGMENT)
        labels, _ = gather_padded(self._targets, indices, pad=0)
        return ClassificationBatch(tokens, labels[:, 0], segments, None, parts)


class QuestionDataset(TwoTextDataset):
    """Questions and documents with the two ends of an answer each; the tokens of the question may be global."""

    def __init__(self, shards: Sequence[TokenShard], *, pad: int, has_global_question: bool) -> None:
        super().__init__(*shards, pad=pad)
        self._has_global_question = has_global_question

    def make_batch(self, indices: IntArray) -> AnswerSpanBatch:
        tokens, segments = gather_padded(self._tokens, indices, pad=self._pad)
        parts, _ = gather_padded(self._parts, indices, pad=PADDING_SEGMENT)
        ends, _ = gather_padded(self._targets, indices, pad=0)
        roles = first_text_roles(parts) if self._has_global_question else None
        return AnswerSpanBatch(tokens, ends, segments, roles, parts)
