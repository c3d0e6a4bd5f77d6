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
    losses = PromptLosses(workload, risk, measure, references)
    tested: list[ThresholdTest] = []
    threshold_losses = ((threshold, losses(threshold)) for threshold in grid)
    for test in fixed_sequence_test(threshold_losses, tolerance=tolerance, confidence=confidence):
        tested.append(test)
        on_test(test)
    certified = [test for test in tested if test.certified]
    if not certified:
        first_test = tested[0]
        raise UserError(
            f"no threshold can be certified: at {first_test.threshold:g} the mean loss of {len(workload.prompts)} "
            f"prompts is {first_test.risk:.4f} with p-value {first_test.p_value:.3g}, which must be at most "
            f"{1 - confidence:g}; use a larger tolerance, a lower confidence, or more prompts"
        )
    lowest = certified[-1]
    loss_descriptions = {
        "consistency": f"distance (1 - {measure}) from the full model's text",
        "quality": f"loss against the full model in {measure} with the reference",
    }
    statement = (
        f"with probability at least {confidence:g} over the {len(workload.prompts)} prompts of the calibration, the "
        f"expected {loss_descriptions[risk]} is at most {tolerance:g} for new prompts of the same distribution "
        f"(threshold {lowest.threshold:g}, greedy decoding)"
    )
    return ThresholdCalibration(
        lowest.threshold, tolerance, confidence, risk, measure, len(workload.prompts), tuple(tested), statement
    )


class PromptLosses:
    """The loss of each prompt under a threshold, from decoding all prompts with it."""

    def __init__(
        self, workload: DecodingWorkload, risk: RiskKind, measure: TextDistance, references: Sequence[str] | None
    ) -> None:
        if risk == "quality" and (references is None or len(references) != len(workload.prompts)):
            raise UserError("the risk 'quality' needs a reference for each prompt; 'consistency' needs none")
        self.workload, self.risk, self.distance, self.references = workload, risk, DISTANCES[measure], references
        self.full_model = workload.decode(None)

    def __call__(self, threshold: float) -> list[float]:
        texts = self.workload.decode(threshold).texts
        if self.risk == "consistency":
            return [
                self.distance(text, full_text) for text, full_text in zip(texts, self.full_model.texts, strict=True)
            ]
        assert self.references is not None
        triples = zip(texts, self.full_model.texts, self.references, strict=True)
        return [
            max(0.0, self.distance(text, reference) - self.distance(full_text, reference))
            for text, full_text, reference in triples
        ]
