"""Attention heads of trained models: what each attends to, and how much the model depends on it."""

from manyformer.analysis.heads.head_analysis import (
    HeadAnalysis,
    HeadReport,
    TokenFrequencies,
    read_head_labels,
    write_head_labels,
)

__all__ = ["HeadAnalysis", "HeadReport", "TokenFrequencies", "read_head_labels", "write_head_labels"]
