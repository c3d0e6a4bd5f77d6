"""Calibration of an exit threshold: the lowest one whose expected loss is certified to stay below a tolerance."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from manyformer.errors import UserError
from manyformer.exits.early_decoding import DecodingWorkload
from manyformer.exits.learn_then_test import ThresholdTest, check_levels, fixed_sequence_test, min_prompt_count
from manyformer.exits.text_distance import DISTANCES, TextDistance

RiskKind = Literal["consistency", "quality"]

DEFAULT_GRID = (0.9995, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.92, *(n / 20 for n in range(18, -1, -1)))
"""Thresholds in descending order, fixed before any calibration; dense near 1, where cosine similarities lie."""


@dataclass(frozen=True)
class ThresholdCalibration:
    """The certified threshold with the settings and tests behind it; `statement` is the guarantee as a sentence."""

    threshold: float
    tolerance: float
    confidence: float
    risk: RiskKind
    measure: TextDistance
    prompts: int
    tested: tuple[ThresholdTest, ...]
    statement: str

    def as_json(self) -> dict[str, Any]:
        """All fields as values that JSON can hold."""
        return {**asdict(self), "tested": [test._asdict() for test in self.tested]}


def calibrate(
    workload: DecodingWorkload,
    *,
    tolerance: float,
    confidence: float = 0.95,
    risk: RiskKind = "consistency",
    measure: TextDistance = "rouge-l",
    references: Sequence[str] | None = None,
    grid: Sequence[float] = DEFAULT_GRID,
    on_test: Callable[[ThresholdTest], None] = lambda test: None,
) -> ThresholdCalibration:
    """Find the lowest threshold of a descending `grid` that the texts decoded from the prompts of `workload` certify.

    The risk "consistency" is the distance of a text from the full model's text; "quality" is the increase, at least 0,
    of its distance from the reference over the full model's (Schuster et al. 2022, section 4). With probability
    `confidence` over the draw of prompts, which must follow the distribution of future prompts, the expected loss of a
    new prompt is at most `tolerance`. Each threshold is tested by decoding all prompts token by token, and `on_test`
    receives the result. Raises UserError where no threshold can be certified.
    """
    check_levels(tolerance, confidence)
    required = min_prompt_count(tolerance, confidence)
    if len(workload.prompts) < required:
        raise UserError(
            f"{len(workload.prompts)} prompts cannot certify any threshold: a tolerance of {tolerance:g} at a "
            f"confidence of {confidence:g} needs at least {required}, even without any loss"
        )
    losses = _prompt_losses(workload, risk, DISTANCES[measure], references)
    tested: list[ThresholdTest] = []
    threshold_losses = ((threshold, losses(threshold)) for threshold in grid)
    for test in fixed_sequence_test(threshold_losses, tolerance=tolerance, confidence=confidence):
        tested.append(test)
        on_test(test)
    if not tested[0].certified:
        raise UserError(
            f"no threshold can be certified: at {tested[0].threshold:g} the mean loss of {len(workload.prompts)} "
            f"prompts is {tested[0].risk:.4f} with p-value {tested[0].p_value:.3g}, which must be at most "
            f"{1 - confidence:g}; use a larger tolerance, a lower confidence, or more prompts"
        )
    lowest = [test.threshold for test in tested if test.certified][-1]
    loss = f"distance (1 - {measure}) from the full model's text"
    if risk == "quality":
        loss = f"loss against the full model in {measure} with the reference"
    statement = (
        f"with probability at least {confidence:g} over the {len(workload.prompts)} prompts of the calibration, the "
        f"expected {loss} is at most {tolerance:g} for new prompts of the same distribution (threshold {lowest:g}, "
        "greedy decoding)"
    )
    prompts = len(workload.prompts)
    return ThresholdCalibration(lowest, tolerance, confidence, risk, measure, prompts, tuple(tested), statement)


def _prompt_losses(
    workload: DecodingWorkload, risk: RiskKind, distance: Callable[[str, str], float], references: Sequence[str] | None
) -> Callable[[float], list[float]]:
    """A function from a threshold to the loss of each prompt, which decodes all prompts."""
    if risk == "quality" and (references is None or len(references) != len(workload.prompts)):
        raise UserError("the risk 'quality' needs a reference for each prompt; 'consistency' needs none")
    full_texts = workload.decode(None).texts
    # the full model's text has no distance from itself
    compared = full_texts if risk == "consistency" or references is None else references
    baseline = list(map(distance, full_texts, compared))

    def losses(threshold: float) -> list[float]:
        distances = map(distance, workload.decode(threshold).texts, compared)
        return [max(0.0, new - full) for new, full in zip(distances, baseline)]

    return losses
