"""Tables that an encoder reads: labelled texts and pairs of sentences, questions about documents, dependency trees."""

from typing import Literal

from manyformer.config.data_sections.data_section import ColumnSpec, DataPaths, SplitSpec, register_section
from manyformer.config.data_sections.tokenized_sections import EncodedTextData, VocabSize, WordTokenizerKind
from manyformer.config.section import PositiveInt


class TabularTextData(EncodedTextData):
    """Settings of tables whose rows are an example each."""

    path: DataPaths
    """A TSV, CSV or JSONL file, or `hf:NAME` (a Hugging Face data set). Each also gzipped."""
    header: bool | None = None
    """Whether the first line of a TSV or CSV names its columns; null means that it is found out, and told. Columns that
    no setting gives are those with a usual name in a header, such as `text` or `sentence`, else the first ones."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the rows held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    max_length: PositiveInt = 256
    """The most tokens in a row: longer texts are truncated at the end, and their number is reported."""


@register_section
class LabelsData(TabularTextData):
    """Labelled texts, for classification."""

    kind: Literal["labels"] = "labels"
    """Labelled texts."""
    text: ColumnSpec | None = None
    """The column of the text; null means the first column of a TSV or CSV without a header, and `text` elsewhere."""
    label: ColumnSpec | None = None
    """The column of the label; null means the second column of a TSV or CSV without a header, and `label` elsewhere."""


@register_section
class SentencePairsData(TabularTextData):
    """Labelled pairs of sentences, for encoders."""

    kind: Literal["sentence-pairs"] = "sentence-pairs"
    """Labelled pairs of sentences."""
    first: ColumnSpec | None = None
    """The column of the first sentence; null means the first column of a TSV or CSV without a header, and `first`
    elsewhere."""
    second: ColumnSpec | None = None
    """The column of the second sentence; null means the second column of a TSV or CSV without a header, and `second`
    elsewhere."""
    label: ColumnSpec | None = None
    """The column of the label; null means the third column of a TSV or CSV without a header, and `label` elsewhere."""


@register_section
class QuestionsData(TabularTextData):
    """Questions about documents, answered by a span of the document or not at all, for encoders."""

    kind: Literal["questions"] = "questions"
    """Questions about documents."""
    document: ColumnSpec | None = None
    """The column of the document; null means the first column of a TSV or CSV without a header, and `document`
    elsewhere. Rows of one document are in one split."""
    question: ColumnSpec | None = None
    """The column of the question; null means the second column of a TSV or CSV without a header, and `question`
    elsewhere."""
    answer: ColumnSpec | None = None
    """The column of the answer, which is empty if the document has none; null means the third column of a TSV or CSV
    without a header, and `answer` elsewhere."""
    start: ColumnSpec | None = None
    """The column with the number of characters before the answer; null means the first place where it occurs."""
    global_tokens: Literal["question", "none"] = "question"
    """Which tokens have the global role, for models with one (longformer, etc): those of the question (Longformer,
    section 3.1), or none."""
    max_length: PositiveInt = 1024
    """The most tokens in a row of a question and a document, which is truncated at the end: answers there are lost, and
    the number of such rows is reported."""


ASSUMED_WORDS = 10_000
"""The assumed vocabulary size of a word model, unknown until the data is read."""


@register_section
class TreesData(EncodedTextData):
    """Sentences with dependency trees and a label for every word, for taggers."""

    kind: Literal["trees"] = "trees"
    """Sentences with dependency trees."""
    path: DataPaths
    """A CoNLL-U file, `-` (standard input), or a list of these. Each also gzipped."""
    tokenizer: WordTokenizerKind = "word"  # type: ignore[assignment]
    """What a token is: a word, or a character, byte or byte pair of one; all tokens of a word have its position in the
    tree, and the first one has its label."""
    vocab: VocabSize | None = None
    """Size of a vocabulary of words or byte pairs; null for words means all words that occur at least twice."""
    label: Literal["relation", "deprel", "upos", "xpos"] = "relation"
    """The label of every word: its relation to its head without or with subtypes (relation, deprel), or its universal
    or language-specific part of speech (upos, xpos)."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the sentences held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    max_length: PositiveInt = 128
    """The most tokens in a sentence: longer sentences are left out of training, and their number is reported."""

    def _expected_vocab(self) -> tuple[int, str]:
        if self.tokenizer == "word" and self.vocab is None and self.tokenizer_of is None:
            return ASSUMED_WORDS, f"as if there were {ASSUMED_WORDS:,} different words; the data decides"
        return super()._expected_vocab()
