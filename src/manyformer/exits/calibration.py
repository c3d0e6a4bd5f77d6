"""Calibration of an exit threshold: the lowest one whose expected loss is certified to stay below a tolerance."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import model_validator

from manyformer.errors import UserError
from manyformer.exits.early_decoding import DecodingWorkload, exit_fingerprint
from manyformer.exits.learn_then_test import (
    ThresholdTest,
    check_levels,
    fixed_sequence_test,
    hoeffding_bentkus_p_value,
    required_count,
)
from manyformer.exits.text_distance import DISTANCES, TextDistance
from manyformer.files.json_records import FileRecord, PositiveCount, Sha256

RiskKind = Literal["consistency", "quality"]
Level = Annotated[float, Gt(0), Lt(1)]

DEFAULT_GRID = (0.9995, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.92, *(n / 20 for n in range(18, -1, -1)))
"""Thresholds in descending order, fixed before any calibration; dense near 1, where cosine similarities lie."""


class ThresholdCalibration(FileRecord):
    """The certified threshold with all that its guarantee depends on: model, decoding, data and tests.

    `model` identifies the weights and the exit rule, `max_new` limits the new tokens of greedy decoding. The losses of
    the `prompts` of a document are averaged, so that the tests count `documents`; `source` describes the data.
    """

    title: ClassVar[str] = "a calibration of an exit threshold"
    max_bytes: ClassVar[int] = 1 << 20

    threshold: Annotated[float, Ge(0)]
    tolerance: Level
    confidence: Level
    risk: RiskKind
    measure: TextDistance
    documents: Annotated[PositiveCount, Le(10_000_000)]
    prompts: PositiveCount
    source: str
    model: Sha256
    max_new: PositiveCount | None
    tested: Annotated[tuple[ThresholdTest, ...], Len(1, 1000)]

    @model_validator(mode="after")
    def _check_tests(self) -> Self:
        """Raise ValueError if the tests do not certify the threshold."""
        for test in self.tested:
            p_value = hoeffding_bentkus_p_value(test.risk, self.documents, self.tolerance)
            is_certified = p_value <= 1 - self.confidence
            if not math.isclose(test.p_value, p_value, rel_tol=1e-6, abs_tol=1e-300) or test.certified != is_certified:
                raise ValueError(f"the test of {test.threshold:g} does not follow from its mean loss {test.risk:g}")
        certified = [test.threshold for test in self.tested if test.certified]
        if self.threshold != min(certified, default=None) or not all(test.certified for test in self.tested[:-1]):
            raise ValueError(f"the tests do not certify the threshold {self.threshold:g}")
        return self

    @property
    def statement(self) -> str:
        """The guarantee as a sentence."""
        loss = f"distance (1 - {self.measure}) from the full model's text"
        if self.risk == "quality":
            loss = f"loss against the full model in {self.measure} with the reference"
        limit = ""
        if self.max_new is not None:
            limit = f" with at most {self.max_new} new tokens"
        return (
            f"with probability at least {self.confidence:g} over the draw of {self.documents:,} documents "
            f"({self.prompts:,} prompt{'s' * (self.prompts > 1)}, from {self.source}), the expected {loss} is at most "
            f"{self.tolerance:g} for a prompt of a new document from the same source, decoded greedily{limit} with "
            f"exits at threshold {self.threshold:g}"
        )


def calibrate(
    workload: DecodingWorkload,
    *,
    tolerance: float,
    confidence: float = 0.95,
    risk: RiskKind = "consistency",
    measure: TextDistance = "rouge-l",
    references: Sequence[str] | None = None,
    documents: Sequence[Hashable] | None = None,
    source: str = "the prompts given",
    grid: Sequence[float] = DEFAULT_GRID,
    on_test: Callable[[ThresholdTest], None] = lambda test: None,
) -> ThresholdCalibration:
    """Find the lowest threshold of a descending `grid` that the texts decoded from the prompts of `workload` certify.

    The risk "consistency" is the distance of a text from the full model's text; "quality" is the increase, at least 0,
    of its distance from the reference over the full model's (Schuster et al. 2022, section 4). `documents` names the
    document of each prompt, by default one for each: prompts of one document depend on each other, so that their mean
    loss counts once. With probability `confidence` over the draw of documents, which must be independent of each other
    and of the model, the expected loss in a new document is at most `tolerance`. Each threshold is tested by decoding
    all prompts token by token, and `on_test` receives the result. Raises UserError where no threshold can be certified.
    """
    check_levels(tolerance, confidence)
    names = range(len(workload.prompts)) if documents is None else documents
    if len(names) != len(workload.prompts):
        raise UserError(f"{len(names)} documents for {len(workload.prompts)} prompts; give the document of each prompt")
    count = len(set(names))
    check_document_count(count, tolerance, confidence, source)
    losses = _prompt_losses(workload, risk, DISTANCES[measure], references)
    tested: list[ThresholdTest] = []
    threshold_losses = ((threshold, document_means(losses(threshold), names)) for threshold in grid)
    for test in fixed_sequence_test(threshold_losses, tolerance=tolerance, confidence=confidence):
        tested.append(test)
        on_test(test)
    if not tested[0].certified:
        raise UserError(_failure(tested[0], count, tolerance, confidence))
    return ThresholdCalibration(
        threshold=[test.threshold for test in tested if test.certified][-1],
        tolerance=tolerance,
        confidence=confidence,
        risk=risk,
        measure=measure,
        documents=count,
        prompts=len(names),
        source=source,
        model=exit_fingerprint(workload.model),
        max_new=workload.max_new,
        tested=tuple(tested),
    )


def check_document_count(count: int, tolerance: float, confidence: float, source: str) -> None:
    """Raise UserError if no losses of so many documents could certify a threshold."""
    required = required_count(tolerance, confidence)
    if count < required:
        raise UserError(
            f"the prompts come from {count:,} document{'s' * (count != 1)} ({source}), and the prompts of a document "
            f"count once: a tolerance of {tolerance:g} at a confidence of {confidence:g} needs at least {required:,} "
            "documents, even if no text loses anything"
        )


def document_means(losses: Sequence[float], documents: Sequence[Hashable]) -> list[float]:
    """The mean loss of each document."""
    by_document: dict[Hashable, list[float]] = {}
    for document, loss in zip(documents, losses, strict=True):
        by_document.setdefault(document, []).append(loss)
    return [math.fsum(values) / len(values) for values in by_document.values()]


def _failure(first: ThresholdTest, count: int, tolerance: float, confidence: float) -> str:
    """Why even the highest threshold of the grid is not certified, and what would help."""
    remedy = "use a larger tolerance: a mean loss above it cannot be certified with any number of documents"
    if first.risk < tolerance:
        required = required_count(tolerance, confidence, first.risk)
        remedy = f"this mean loss needs about {required:,} documents; use more, or a larger tolerance"
    return (
        f"no threshold can be certified: at {first.threshold:g} the mean loss of {count:,} documents is "
        f"{first.risk:.4f} with p-value {first.p_value:.3g}, which must be at most {1 - confidence:g}; {remedy}"
    )


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
