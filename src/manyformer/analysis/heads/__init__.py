"""Attention heads of trained models: what each attends to, and how much the model depends on it."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.analysis.heads.head_analysis import (
        HeadAnalysis,
        HeadReport,
        TokenFrequencies,
        read_head_labels,
        write_head_labels,
    )

_MODULES = {
    "HeadAnalysis": "manyformer.analysis.heads.head_analysis",
    "HeadReport": "manyformer.analysis.heads.head_analysis",
    "TokenFrequencies": "manyformer.analysis.heads.head_analysis",
    "read_head_labels": "manyformer.analysis.heads.head_analysis",
    "write_head_labels": "manyformer.analysis.heads.head_analysis",
}

__all__ = ["HeadAnalysis", "HeadReport", "TokenFrequencies", "read_head_labels", "write_head_labels"]


_offer_names(__name__, _MODULES)
