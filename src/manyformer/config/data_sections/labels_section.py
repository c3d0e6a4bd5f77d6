"""Labelled texts, for classification."""

from typing import Literal

from manyformer.config.data_sections.data_section import (
    ColumnSpec,
    DataPaths,
    SplitSpec,
    TokenizedData,
    TokenizerKind,
    register_section,
)
from manyformer.config.section import PositiveInt


@register_section
class LabelsData(TokenizedData):
    """Labelled texts, for classification."""

    kind: Literal["labels"] = "labels"
    """Labelled texts."""
    path: DataPaths
    """A TSV or JSONL file, or `hf:NAME` (a Hugging Face data set). Each also gzipped."""
    tokenizer: TokenizerKind = "bpe"
    """What a token is: one character, one byte, or a byte pair of a vocabulary trained on the training data."""
    text: ColumnSpec | None = None
    """The column of the text; null means the first column of a TSV and `text` in JSONL and Hugging Face data."""
    label: ColumnSpec | None = None
    """The column of the label; null means the second column of a TSV and `label` in JSONL and Hugging Face data."""
    valid: SplitSpec = 0.1
    """Validation data: the fraction of the texts held out, or a path."""
    test: DataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path."""
    max_length: PositiveInt = 256
    """The most tokens in a text: longer texts are truncated at the end, and their number is reported."""

    @property
    def row_length(self) -> int:
        return self.max_length
