"""Models that tokens leave early, at work: thresholds swept, and calibrated so that a guarantee holds."""

from manyformer.exits.calibration import ThresholdCalibration, calibrate
from manyformer.exits.early_decoding import DecodedTexts, DecodingWorkload, depths
from manyformer.exits.prompts_from_run import PromptSet, material
from manyformer.exits.sweep import ThresholdPoint, sweep

__all__ = [
    "DecodedTexts",
    "DecodingWorkload",
    "PromptSet",
    "ThresholdCalibration",
    "ThresholdPoint",
    "calibrate",
    "depths",
    "material",
    "sweep",
]
