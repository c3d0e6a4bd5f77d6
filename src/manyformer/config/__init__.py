"""A training run as one validated record, and the YAML and command-line layer that fills it. Never imports torch."""

from manyformer.config.compare import FREE_ON_RESUME, differences, dump_run
from manyformer.config.data import (
    DataConfig,
    ImagesData,
    LabelsData,
    PairsData,
    SyntheticData,
    TextData,
    TokenizerKind,
    TreesData,
    longest_row,
)
from manyformer.config.describe import Setting, describe_settings, json_schema
from manyformer.config.load import KINDS, RUN_FILE, load_run
from manyformer.config.run import Run
from manyformer.config.shipped import about_run, shipped_comparisons, shipped_runs
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
    "FREE_ON_RESUME",
    "KINDS",
    "RUN_FILE",
    "Adam",
    "AdamW",
    "BatchConfig",
    "Constant",
    "Cosine",
    "DataConfig",
    "Evaluate",
    "ImagesData",
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
    "Setting",
    "SyntheticData",
    "TextData",
    "TokenizerKind",
    "TreesData",
    "about_run",
    "describe_settings",
    "differences",
    "dump_run",
    "json_schema",
    "load_run",
    "longest_row",
    "shipped_comparisons",
    "shipped_runs",
]
