"""Pairs of a source and a target text, for translation."""

from typing import Literal

from manyformer.config.data_sections.data_section import (
    ColumnSpec,
    PairDataPaths,
    PairSplitSpec,
    TokenizedData,
    TokenizerKind,
    register_section,
)
from manyformer.config.section import PositiveInt


@register_section
class PairsData(TokenizedData):
    """Pairs of a source and a target text, for translation."""

    kind: Literal["pairs"] = "pairs"
    """Pairs of a source and a target."""
    path: PairDataPaths = "normalization"
    """`normalization` (generated dates and numbers in words, to ISO form), a TSV or JSONL file, a list of two parallel
    files, or `hf:NAME` (a Hugging Face data set). Each also gzipped."""
    tokenizer: TokenizerKind = "bpe"
    """What a token is: one character, one byte, or a byte pair of a vocabulary trained on the training data."""
    valid: PairSplitSpec = 0.05
    """Validation data: the fraction of the pairs held out, or a path as above."""
    test: PairDataPaths | None = None
    """Test data, scored by `manyformer evaluate` alone: a path as above."""
    source: ColumnSpec | None = None
    """The column of the source; null means the first column of a TSV and `source` in JSONL and Hugging Face data."""
    target: ColumnSpec | None = None
    """The column of the target; null means the second column of a TSV and `target` in JSONL and Hugging Face data."""
    shared: bool = True
    """One vocabulary for both sides; false trains one for each."""
    max_length: PositiveInt = 128
    """The most tokens on a side: longer pairs are left out of training, and their number is reported."""

    @property
    def row_length(self) -> int:
        return self.max_length
