"""Early-exit decoding: sweeps of exit thresholds, and threshold calibration with a statistical guarantee."""

from manyformer.inference.early_exit.calibration import ThresholdCalibration, calibrate, use_calibration
from manyformer.inference.early_exit.early_decoding import DecodedTexts, DecodingWorkload, exit_layers
from manyformer.inference.early_exit.prompts_from_run import PromptSet, load_calibration_prompts, load_prompts
from manyformer.inference.early_exit.sweep import ThresholdPoint, sweep

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
