"""Decoding with calibrated exits: a certified threshold is used only where its guarantee holds."""

from pathlib import Path

from manyformer.errors import UserError
from manyformer.exits.calibration import ThresholdCalibration
from manyformer.exits.early_decoding import early_exit_stack, exit_fingerprint, rule_at_threshold
from manyformer.generate import Decoding
from manyformer.generate.decoding import BeamSettings, GreedyChoice
from manyformer.models import Model


def use_calibration(model: Model, file: str | Path, decoding: Decoding) -> None:
    """Let the tokens of `model` exit at the threshold of the calibration in `file`.

    Raises UserError where the guarantee would not hold: for a damaged file, a model with other weights or another exit
    rule than the calibrated one, and for a decoding that is not the calibrated one.
    """
    path = Path(file)
    calibration = ThresholdCalibration.read(path)
    if exit_fingerprint(model) != calibration.model:
        raise UserError(
            f"{path} was made for a model with other weights or another exit rule, so its guarantee does not hold for "
            "this one; calibrate this model"
        )
    if difference := _decoding_difference(decoding, calibration.max_new):
        limit = "as many new tokens as by default"
        if calibration.max_new is not None:
            limit = f"max_new {calibration.max_new}"
        raise UserError(
            f"{path} holds for greedy decoding with {limit}, and this is {difference}: decode greedily with {limit}, "
            "or without the calibration"
        )
    stack = early_exit_stack(model)
    stack.rule = rule_at_threshold(stack, calibration.threshold)


def _decoding_difference(decoding: Decoding, max_new: int | None) -> str | None:
    """What differs from greedy decoding with `max_new`, None if nothing does; a beam of width 1 is greedy."""
    choice = decoding.choice
    if isinstance(choice, BeamSettings) and choice.width > 1:
        return f"beam search of width {choice.width}"
    if not isinstance(choice, BeamSettings | GreedyChoice):
        return "sampling"
    if decoding.max_new != max_new:
        return f"max_new {'by default' if decoding.max_new is None else decoding.max_new}"
    options = {"processors": (), "stop": (), "stop_ids": None, "ban": None}
    changed = [name for name, default in options.items() if getattr(decoding, name) != default]
    if changed:
        return f"decoding with {changed[0]} {getattr(decoding, changed[0])}"
    return None
