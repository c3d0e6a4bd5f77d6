"""Early-exit decoding: sweeps of exit thresholds, and threshold calibration with a statistical guarantee."""

from manyformer.exits.calibration import ThresholdCalibration, calibrate, use_calibration
from manyformer.exits.early_decoding import DecodedTexts, DecodingWorkload, exit_layers
from manyformer.exits.prompts_from_run import PromptSet, load_calibration_prompts, load_prompts
from manyformer.exits.sweep import ThresholdPoint, sweep

__all__ = [
    "DecodedTexts",
    "DecodingWorkload",
    "PromptSet",
    "ThresholdCalibration",
    "ThresholdPoint",
    "calibrate",
    "exit_layers",
    "load_calibration_prompts",
    "load_prompts",
    "sweep",
    "use_calibration",
]
