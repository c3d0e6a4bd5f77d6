"""Early-exit decoding: sweeps of exit thresholds, and threshold calibration with a statistical guarantee."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.inference.early_exit.calibration import ThresholdCalibration, calibrate, use_calibration
    from manyformer.inference.early_exit.early_decoding import DecodedTexts, DecodingWorkload, exit_layers
    from manyformer.inference.early_exit.prompts_from_run import PromptSet, load_calibration_prompts, load_prompts
    from manyformer.inference.early_exit.sweep import ThresholdPoint, sweep

_MODULES = {
    "DecodedTexts": "manyformer.inference.early_exit.early_decoding",
    "DecodingWorkload": "manyformer.inference.early_exit.early_decoding",
    "PromptSet": "manyformer.inference.early_exit.prompts_from_run",
    "ThresholdCalibration": "manyformer.inference.early_exit.calibration",
    "ThresholdPoint": "manyformer.inference.early_exit.sweep",
    "calibrate": "manyformer.inference.early_exit.calibration",
    "exit_layers": "manyformer.inference.early_exit.early_decoding",
    "load_calibration_prompts": "manyformer.inference.early_exit.prompts_from_run",
    "load_prompts": "manyformer.inference.early_exit.prompts_from_run",
    "sweep": "manyformer.inference.early_exit.sweep",
    "use_calibration": "manyformer.inference.early_exit.calibration",
}

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


_offer_names(__name__, _MODULES)
