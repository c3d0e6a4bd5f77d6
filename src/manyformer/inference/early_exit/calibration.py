"""Calibration of an exit threshold: the lowest one whose expected loss is certified to stay below a tolerance.

By learn-then-test a descending sequence of thresholds is tested, until one is not certified. A calibrated threshold is
used only where its guarantee holds."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import numpy as np
from annotated_types import Ge, Gt, Le, Len, Lt
from pydantic import model_validator

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import FileRecord, PositiveCount, Sha256
from manyformer.base.type_aliases import FloatArray
from manyformer.inference.early_exit.early_decoding import (
    DISTANCES,
    DecodingWorkload,
    TextDistance,
    early_exit_stack,
    exit_fingerprint,
    rule_at_threshold,
)
from manyformer.inference.generate import Decoding
from manyformer.inference.generate.decoding import BeamSettings, GreedyChoice
from manyformer.models import Model

RiskKind = Literal["consistency", "quality"]
Level = Annotated[float, Gt(0), Lt(1)]
DEFAULT_GRID = (0.9995, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.92, *(n / 20 for n in range(18, -1, -1)))
"""Thresholds in descending order, fixed before any calibration; dense near 1, where cosine similarities lie."""


class ThresholdTest(NamedTuple):
    """The test of one threshold: its mean loss, the p-value of that, and whether the threshold is certified."""

    threshold: float
    risk: float
    p_value: float
    certified: bool


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
        # a file may be edited by hand: its numbers must follow from each other as the test would compute them
        for test in self.tested:
            p_value = hoeffding_bentkus_p_value(test.risk, self.documents, self.tolerance)
            is_certified = p_value <= 1 - self.confidence
            if not math.isclose(test.p_value, p_value, rel_tol=1e-6, abs_tol=1e-300) or test.certified != is_certified:
                raise ValueError(f"the test of {test.threshold:g} does not follow from its mean loss {test.risk:g}")
        # fixed-sequence testing stops at the first failure, so that only the last test may be one
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
    # a generator: thresholds below the first failure are never decoded
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
        # a text that is nearer to its reference than the full model's is no gain: losses must lie in [0, 1]
        return [max(0.0, new - full) for new, full in zip(distances, baseline)]

    return losses


def fixed_sequence_test(
    losses: Iterable[tuple[float, Sequence[float]]], *, tolerance: float, confidence: float
) -> Iterator[ThresholdTest]:
    """Test thresholds in descending order, each with independent losses, up to the first that is not certified.

    Fixed-sequence testing of the hypothesis "the expected loss exceeds `tolerance`" (Angelopoulos et al. 2021,
    arXiv:2110.01052; Schuster et al. 2022, section 4): with probability `confidence` at least, the expected loss under
    every certified threshold is at most `tolerance`. Thresholds must be fixed in advance; losses after the first
    failure are not requested. Raises UserError for a tolerance or a confidence that is not between 0 and 1, for
    thresholds that do not descend, and without losses.
    """
    check_levels(tolerance, confidence)
    previous = math.inf
    for threshold, independent_losses in losses:
        if not len(independent_losses):
            raise UserError("a threshold cannot be tested without prompts")
        if not all(0 <= loss <= 1 for loss in independent_losses):
            raise UserError(f"the losses at threshold {threshold:g} must be numbers from 0 to 1")
        if threshold >= previous:
            raise UserError(f"thresholds must be in descending order, but {threshold:g} follows {previous:g}")
        # exact sums, so that a file that is checked later gives the same p-value
        risk = math.fsum(independent_losses) / len(independent_losses)
        p_value = hoeffding_bentkus_p_value(risk, len(independent_losses), tolerance)
        test = ThresholdTest(threshold, risk, p_value, p_value <= 1 - confidence)
        yield test
        if not test.certified:
            return
        previous = threshold


def check_levels(tolerance: float, confidence: float) -> None:
    """Raise UserError for a level that is not between 0 and 1."""
    for name, value in (("tolerance", tolerance), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UserError(f"{name} ({value}) must lie between 0 and 1")


def required_count(tolerance: float, confidence: float, risk: float = 0.0) -> int:
    """How many independent losses with the mean `risk`, below `tolerance`, certify a threshold by Hoeffding's bound.

    For no risk at all no smaller number does.
    """
    return math.ceil(math.log(1 - confidence) / -_relative_entropy(risk, tolerance))


def hoeffding_bentkus_p_value(risk: float, count: int, tolerance: float) -> float:
    """The smaller of the two p-values (Bates et al. 2021, arXiv:2101.02703, proposition 6), at most 1."""
    return min(1.0, hoeffding_p_value(risk, count, tolerance), bentkus_p_value(risk, count, tolerance))


def hoeffding_p_value(risk: float, count: int, tolerance: float) -> float:
    """The p-value of a mean `risk` of `count` losses in [0, 1] if the expected loss exceeds `tolerance`.

    Hoeffding's (1963) inequality in its tight form, exp(-n h(risk, tolerance)) with h the relative entropy of Bernoulli
    distributions.
    """
    # above the tolerance the inequality says nothing, and the p-value is 1
    low = min(risk, tolerance)
    return math.exp(-count * _relative_entropy(low, tolerance))


def bentkus_p_value(risk: float, count: int, tolerance: float) -> float:
    """The same p-value by Bentkus (2004): e times the probability of at most ceil(n risk) in Binomial(n, tolerance)."""
    return math.e * binomial_cdf(math.ceil(count * risk), count, tolerance)


def binomial_cdf(successes: int, trials: int, probability: float) -> float:
    """The probability of at most `successes` in `trials` trials of success `probability`, strictly between 0 and 1.

    Computed from the ratios of neighboring probabilities to the largest one, so that nothing overflows and no digits
    are lost.
    """
    if successes >= trials:
        return 1.0
    mode = min(trials, math.floor((trials + 1) * probability))
    odds = probability / (1 - probability)
    counts_above = np.arange(mode, trials)
    counts_below = np.arange(mode, 0, -1)
    ratios_above = np.cumprod((trials - counts_above) / (counts_above + 1) * odds)
    ratios_below = np.cumprod(counts_below / (trials - counts_below + 1) / odds)
    weights: FloatArray = np.concatenate([ratios_below[::-1], [1.0], ratios_above])
    # the smallest weights first
    return math.fsum(weights[: successes + 1]) / math.fsum(weights)


def _relative_entropy(p: float, q: float) -> float:
    """The relative entropy of Bernoulli(p) with respect to Bernoulli(q)."""
    success_term = p * math.log(p / q) if p > 0 else 0.0
    return success_term + ((1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else 0.0)


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
    # after all checks: a refused model keeps its own rule
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
