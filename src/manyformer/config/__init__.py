"""Configuration of training runs: validated sections, run files and command-line overrides. Never imports torch."""

from manyformer.config.data_sections import (
    DATA_SECTIONS,
    DataSection,
    EnvironmentData,
    GraphsData,
    ImagesData,
    LabelsData,
    PairsData,
    SyntheticData,
    TextData,
    TokenizedData,
    TrajectoriesData,
    TreesData,
    register_section,
)
from manyformer.config.describe import SettingHelp, describe_keywords, describe_settings, json_schema
from manyformer.config.load import RUN_FILE, ImportFn, RecipeLookup, describe_misfits, load_run
from manyformer.config.run import RunConfig
from manyformer.config.run_diff import FREE_ON_RESUME, differences, dump_run
from manyformer.config.shipped import run_description, shipped_comparisons, shipped_runs
from manyformer.config.training_sections import (
    AdamConfig,
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    EvaluateConfig,
    LimitsConfig,
    NoamSchedule,
    OptimConfig,
)

__all__ = [
    "DATA_SECTIONS",
    "FREE_ON_RESUME",
    "RUN_FILE",
    "AdamConfig",
    "AdamWConfig",
    "ConstantSchedule",
    "CosineSchedule",
    "DataSection",
    "EnvironmentData",
    "EvaluateConfig",
    "GraphsData",
    "ImagesData",
    "ImportFn",
    "LabelsData",
    "LimitsConfig",
    "NoamSchedule",
    "OptimConfig",
    "PairsData",
    "RecipeLookup",
    "RunConfig",
    "SettingHelp",
    "SyntheticData",
    "TextData",
    "TokenizedData",
    "TrajectoriesData",
    "TreesData",
    "describe_keywords",
    "describe_misfits",
    "describe_settings",
    "differences",
    "dump_run",
    "json_schema",
    "load_run",
    "register_section",
    "run_description",
    "shipped_comparisons",
    "shipped_runs",
]
