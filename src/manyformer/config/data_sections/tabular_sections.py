"""Tables of texts that an encoder reads: labelled texts, labelled pairs of sentences, questions about documents."""

from typing import Literal

from manyformer.config.data_sections.data_section import ColumnSpec, DataPaths, SplitSpec, register_section
from manyformer.config.data_sections.tokenized_sections import EncodedTextData
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
