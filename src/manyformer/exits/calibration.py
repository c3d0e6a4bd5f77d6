"""`calibrate`: the lowest threshold at which whole texts stay near those of the full model, or as good, for certain."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from manyformer.errors import UserError
from manyformer.exits.early_decoding import DecodingWorkload
from manyformer.exits.learn_then_test import ThresholdTest, check_levels, fixed_sequence, prompts_needed
from manyformer.exits.text_distance import DISTANCES, TextDistance

RiskKind = Literal["consistency", "quality"]

GRID = (0.9995, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.92, *(n / 20 for n in range(18, -1, -1)))
"""Thresholds from the most careful down, fixed before any calibration; near 1, where cosines are, they are dense."""


@dataclass(frozen=True)
class ThresholdCalibration:
    """The certified threshold and what it rests on; `statement` is the guarantee in words."""

    threshold: float
    tolerance: float
    confidence: float
    risk: RiskKind
    measure: TextDistance
    prompts: int
    tested: tuple[ThresholdTest, ...]
    statement: str

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "tested": [one._asdict() for one in self.tested]}


def calibrate(
    task: DecodingWorkload,
    *,
    tolerance: float,
    confidence: float = 0.95,
    risk: RiskKind = "consistency",
    measure: TextDistance = "rouge-l",
    references: Sequence[str] | None = None,
    grid: Sequence[float] = GRID,
    each: Callable[[ThresholdTest], None] = lambda tested: None,
) -> ThresholdCalibration:
    """The lowest threshold of a descending `grid` that is certified by what the model writes to the prompts of `task`.

    "consistency" is the distance of a text from the full model's; "quality" by how much farther than the full model's
    it is from its reference, at least 0 (Schuster et al. 2022, section 4). With chance `confidence` over the choice of
    prompts, which must be drawn as those to come are, the loss expected of a new prompt is at most `tolerance`. Each
    threshold is tested by writing everything, token by token. Raises UserError where nothing can be certified.
    """
    check_levels(tolerance, confidence)
    least = prompts_needed(tolerance, confidence)
    if len(task.prompts) < least:
        raise UserError(
            f"{len(task.prompts)} prompts cannot certify anything: a tolerance of {tolerance:g} at a confidence of "
            f"{confidence:g} takes at least {least}, even without any loss"
        )
    losses = PromptLosses(task, risk, measure, references)
    tested: list[ThresholdTest] = []
    rows = ((threshold, losses(threshold)) for threshold in grid)
    for one in fixed_sequence(rows, tolerance=tolerance, confidence=confidence):
        tested.append(one)
        each(one)
    certified = [one for one in tested if one.certified]
    if not certified:
        first = tested[0]
        raise UserError(
            f"nothing can be certified: at a threshold of {first.threshold:g} the mean loss of {len(task.prompts)} "
            f"prompts is {first.risk:.4f}, p-value {first.p_value:.3g}, and must be at most {1 - confidence:g}; allow "
            "a larger tolerance, ask for less confidence, or take more prompts"
        )
    last = certified[-1]
    about = {
        "consistency": f"distance (1 - {measure}) from what the full model writes",
        "quality": f"loss against the full model in {measure} with the reference",
    }
    statement = (
        f"with chance at least {confidence:g} over the {len(task.prompts)} prompts of the calibration, the expected "
        f"{about[risk]} is at most {tolerance:g} for new prompts of that kind (threshold {last.threshold:g}, greedy)"
    )
    return ThresholdCalibration(
        last.threshold, tolerance, confidence, risk, measure, len(task.prompts), tuple(tested), statement
    )


class PromptLosses:
    """What each prompt loses under a threshold, by writing to all of them."""

    def __init__(
        self, task: DecodingWorkload, risk: RiskKind, measure: TextDistance, references: Sequence[str] | None
    ) -> None:
        if risk == "quality" and (references is None or len(references) != len(task.prompts)):
            raise UserError("the risk 'quality' needs a reference for each prompt; 'consistency' needs none")
        self.task, self.risk, self.distance, self.references = task, risk, DISTANCES[measure], references
        self.full = task.write(None)

    def __call__(self, threshold: float) -> list[float]:
        written = self.task.write(threshold).texts
        if self.risk == "consistency":
            return [self.distance(text, full) for text, full in zip(written, self.full.texts, strict=True)]
        assert self.references is not None
        both = zip(written, self.full.texts, self.references, strict=True)
        return [max(0.0, self.distance(text, right) - self.distance(full, right)) for text, full, right in both]
