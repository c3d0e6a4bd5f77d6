"""Configuration of training runs: validated sections, run files and command-line overrides. Never imports torch."""

from manyformer.config.data_sections import (
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
from manyformer.config.describe import SettingHelp, describe_settings, json_schema
from manyformer.config.load import DATA_KINDS, RUN_FILE, ImportFn, load_run
from manyformer.config.run import RunConfig
from manyformer.config.run_diff import FREE_ON_RESUME, differences, dump_run
from manyformer.config.shipped import run_description, shipped_comparisons, shipped_runs
from manyformer.config.training_sections import (
    AdamConfig,
    AdamWConfig,
    BatchConfig,
    ConstantSchedule,
    CosineSchedule,
    EvaluateConfig,
    LimitsConfig,
    LogConfig,
    LossConfig,
    NoamSchedule,
    OptimConfig,
    SaveConfig,
    ScheduleConfig,
)

__all__ = [
    "DATA_KINDS",
    "FREE_ON_RESUME",
    "RUN_FILE",
    "AdamConfig",
    "AdamWConfig",
    "BatchConfig",
    "ConstantSchedule",
    "CosineSchedule",
    "DataConfig",
    "EvaluateConfig",
    "ImagesData",
    "ImportFn",
    "LabelsData",
    "LimitsConfig",
    "LogConfig",
    "LossConfig",
    "NoamSchedule",
    "OptimConfig",
    "PairsData",
    "RunConfig",
    "SaveConfig",
    "ScheduleConfig",
    "SettingHelp",
    "SyntheticData",
    "TextData",
    "TokenizerKind",
    "TreesData",
    "describe_settings",
    "differences",
    "dump_run",
    "json_schema",
    "load_run",
    "longest_row",
    "run_description",
    "shipped_comparisons",
    "shipped_runs",
]
