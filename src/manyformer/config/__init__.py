"""A training run as one validated record, and the YAML and command-line layer that fills it. Never imports torch."""

from manyformer.config.data import DataConfig, LabelsData, PairsData, TextData, TokenizerKind
from manyformer.config.run import Run
from manyformer.config.training import (
    Adam,
    AdamW,
    BatchConfig,
    Constant,
    Cosine,
    Evaluate,
    Limits,
    Log,
    LossConfig,
    Noam,
    OptimConfig,
    Save,
    ScheduleConfig,
)

__all__ = [
    "Adam",
    "AdamW",
    "BatchConfig",
    "Constant",
    "Cosine",
    "DataConfig",
    "Evaluate",
    "LabelsData",
    "Limits",
    "Log",
    "LossConfig",
    "Noam",
    "OptimConfig",
    "PairsData",
    "Run",
    "Save",
    "ScheduleConfig",
    "TextData",
    "TokenizerKind",
]
