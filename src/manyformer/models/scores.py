"""Scores of predictions, of episodes and of texts, each with a signature of how it was computed.

Two scores are compared by one rule, `rank_key`; those of texts are sacrebleu's and jiwer's.
A score that is no finite number is never the best."""

import importlib
import math
import re
import string
from collections import Counter
from collections.abc import Hashable, Sequence, Sized
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

__all__ = [
    "ScoreKind",
    "ScoreRecord",
    "accuracy",
    "answer_exact_match",
    "answer_f1",
    "bits_per_byte",
    "bits_per_character",
    "bits_per_dimension",
    "bleu",
    "bleu_by_length",
    "character_error_rate",
    "chrf",
    "exact_match",
    "f1",
    "is_comparable",
    "mean_length",
    "mean_return",
    "perplexity",
    "rank_key",
    "row_exact_match",
    "success_rate",
    "ter",
    "token_accuracy",
    "word_error_rate",
]


@dataclass(frozen=True)
class ScoreRecord:
    """A score with its `signature`: two scores are comparable if their signatures are equal.

    `parts` are its components, such as the F1 of each class or BLEU's precisions.
    """

    name: str
    value: float
    signature: str
    digits: int = 2
    parts: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.value:.{self.digits}f} ({self.signature})"


class ScoreKind(NamedTuple):
    """How a score is displayed: its unit, whether lower is better, and the number of decimal digits."""

    unit: str = ""
    lower_is_better: bool = False
    digits: int = 2


def check_pairs(predictions: Sized, references: Sized, item_name: str) -> None:
    """Raise UserError for empty input or unequal numbers of predictions and references."""
    if len(predictions) != len(references):
        raise UserError(
            f"{len(predictions)} {item_name} cannot be scored against {len(references)} references: give one for each"
        )
    if not len(predictions):
        raise UserError(f"there are no {item_name} to score")


def is_comparable(score: float | None) -> bool:
    """Whether a score can be compared with others: it is there, and neither NaN nor infinite."""
    return score is not None and math.isfinite(score)


def rank_key(score: float | None, *, lower_is_better: bool = True) -> float:
    """The number by which scores are sorted, best first: what cannot be compared comes last, whatever it is."""
    if score is None or not math.isfinite(score):
        return math.inf
    if lower_is_better:
        return score
    return -score


F1Average = Literal["macro", "micro"]


def accuracy(predictions: Sequence[Hashable], references: Sequence[Hashable]) -> ScoreRecord:
    """The percentage of correct predictions. Raises UserError for unequal lengths and empty input."""
    check_pairs(predictions, references, "predictions")
    correct = sum(a == b for a, b in zip(predictions, references))
    return ScoreRecord("accuracy", 100 * correct / len(predictions), f"items:{len(predictions)}")


def f1(
    predictions: Sequence[Hashable],
    references: Sequence[Hashable],
    *,
    average: F1Average = "macro",
    classes: Sequence[Hashable] | None = None,
) -> ScoreRecord:
    """The harmonic mean of precision and recall, 0 to 100; `parts` has that of each class.

    "macro" is the mean over classes, with 0 for a class that is neither predicted nor in the references; "micro"
    counts decisions over all classes, which is the accuracy unless `classes` excludes some (such as the "other" class
    of a tagger). `classes` are by default those that occur. Raises UserError for unequal lengths and empty input.
    """
    check_pairs(predictions, references, "predictions")
    if average not in ("macro", "micro"):
        raise UserError(f"average must be 'macro' or 'micro', got '{average}'")
    # a class that is neither predicted nor present would lower a mean over classes
    if classes is None:
        names = sorted({*predictions, *references}, key=str)
    else:
        names = list(classes)
    if not names:
        raise UserError("there are no classes to score")
    correct = Counter(a for a, b in zip(predictions, references) if a == b)
    predicted = Counter(predictions)
    actual = Counter(references)
    parts = {str(name): _f1(correct[name], predicted[name], actual[name]) for name in names}
    if average == "macro":
        value = sum(parts.values()) / len(parts)
    else:
        value = _f1(*(sum(count[name] for name in names) for count in (correct, predicted, actual)))
    return ScoreRecord(
        f"{average} F1", value, f"average:{average}|classes:{len(names)}|items:{len(predictions)}", parts=parts
    )


def _f1(correct: int, predicted: int, actual: int) -> float:
    if predicted + actual:
        return 100 * 2 * correct / (predicted + actual)
    return 0.0


def perplexity(nats: float, count: int) -> ScoreRecord:
    """exp of the mean negative log-likelihood per token; `nats` must not include label smoothing."""
    mean = _mean(nats, count, "token")
    # exp would overflow: the perplexity is infinite, not an error
    value = math.exp(mean) if mean < 700 else math.inf
    return ScoreRecord("perplexity", value, f"per:token|tokens:{count}", parts={"nats": mean})


def bits_per_character(nats: float, characters: int) -> ScoreRecord:
    """Bits per character (Unicode code point) of the text, independent of the tokenizer."""
    mean = _mean(nats, characters, "character")
    return ScoreRecord("bits per character", mean / math.log(2), f"per:character|characters:{characters}", 4)


def bits_per_byte(nats: float, size: int) -> ScoreRecord:
    """Bits per UTF-8 byte of the text, independent of the tokenizer."""
    return ScoreRecord("bits per byte", _mean(nats, size, "byte") / math.log(2), f"per:byte|bytes:{size}", 4)


def bits_per_dimension(nats: float, values: int) -> ScoreRecord:
    """Bits per value (pixels times channels) of images."""
    return ScoreRecord(
        "bits per dimension", _mean(nats, values, "value") / math.log(2), f"per:value|values:{values}", 4
    )


def token_accuracy(correct: int, count: int) -> ScoreRecord:
    """The percentage of tokens that are the most likely ones given the true previous tokens."""
    if not 0 <= correct <= count:
        raise UserError(f"correct must be from 0 to the {count} tokens, got {correct}")
    return ScoreRecord("token accuracy", 100 * _mean(correct, count, "token"), f"per:token|tokens:{count}")


def row_exact_match(correct: int, rows: int) -> ScoreRecord:
    """The percentage of rows all of whose targets are the most likely ones given the true previous tokens."""
    if not 0 <= correct <= rows:
        raise UserError(f"correct must be from 0 to the {rows} rows, got {correct}")
    return ScoreRecord("exact match", 100 * _mean(correct, rows, "row"), f"per:row|rows:{rows}")


def _mean(total: float, count: int, unit: str) -> float:
    if count < 1:
        raise UserError(f"there is no {unit} to score: the count is {count}")
    return total / count


RESAMPLES = 10_000
BOOTSTRAP_SEED = 12345
NORMAL_QUANTILE = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def mean_return(returns: NDArray[np.floating]) -> ScoreRecord:
    """The mean return, with the percentile interval of the bootstrap over episodes (Efron 1979).

    Raises UserError without episodes."""
    check_episodes(returns)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    count = len(returns)
    # in chunks, so that many episodes do not fill the memory
    chunk = max(1, min(RESAMPLES, (1 << 22) // count))
    means = np.concatenate(
        [returns[generator.integers(count, size=(chunk, count))].mean(axis=1) for _ in range(-(-RESAMPLES // chunk))]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return _interval_score("return", float(returns.mean()), float(low), float(high), f"bootstrap|episodes:{count}", 3)


def success_rate(successes: NDArray[np.bool_]) -> ScoreRecord:
    """The percentage of successes, with the interval of Wilson (1927), which is not empty where all or none succeed.

    Raises UserError without episodes."""
    check_episodes(successes)
    count = len(successes)
    share = float(successes.mean())
    z = NORMAL_QUANTILE
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    low = max(0.0, center - half)
    high = min(1.0, center + half)
    return _interval_score("success", 100 * share, 100 * low, 100 * high, f"Wilson|episodes:{count}", 1)


def mean_length(lengths: NDArray[np.integer]) -> ScoreRecord:
    """The mean number of steps of an episode. Raises UserError without episodes."""
    check_episodes(lengths)
    return ScoreRecord("episode length", float(lengths.mean()), f"episodes:{len(lengths)}", digits=1)


def check_episodes(values: NDArray[np.generic]) -> None:
    """Raise UserError if there are no episodes."""
    if not len(values):
        raise UserError("there are no episodes to score")


def _interval_score(name: str, value: float, low: float, high: float, method: str, digits: int) -> ScoreRecord:
    signature = f"95% interval {low:.{digits}f} to {high:.{digits}f}|{method}"
    return ScoreRecord(name, value, signature, digits=digits, parts={"low": low, "high": high})


References = Sequence[str] | Sequence[Sequence[str]]
"""One reference for each text, or several sets of references."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bleu(
    texts: Sequence[str], references: References, *, tokenize: str | None = None, lowercase: bool = False
) -> ScoreRecord:
    """BLEU of a corpus (Papineni et al. 2002; Post 2018), 0 to 100.

    `tokenize` is sacrebleu's: "13a" by default, "none" for text that is already tokenized, "char", "intl", "zh", ...
    Raises UserError for unequal lengths, for empty input and for an unknown tokenizer.
    """
    bleu_class = _sacrebleu("bleu").BLEU
    # before sacrebleu raises an error of its own, which names no setting
    if tokenize is not None and tokenize not in bleu_class.TOKENIZERS:
        raise UserError(f"tokenize must be one of {', '.join(sorted(bleu_class.TOKENIZERS))}, got '{tokenize}'")
    # force only silences the warning about text that looks tokenized
    metric = bleu_class(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")
    return _corpus_score("BLEU", metric, texts, references)


def bleu_by_length(
    texts: Sequence[str], references: Sequence[str], sources: Sequence[str], limits: Sequence[int], **options: Any
) -> list[ScoreRecord]:
    """BLEU of the texts whose source has at most so many words, for each range between the ascending `limits`.

    A last range holds longer sources; ranges without sources are left out. `options` are those of `bleu`. The parts of
    a record are the mean number of source `words`, and the number of `texts`. Raises as `bleu`.
    """
    counts = [len(source.split()) for source in sources]
    scores = []
    # the last range ends at the longest source
    for low, high in zip((0, *limits), (*limits, max(counts, default=0)), strict=True):
        chosen = [index for index, count in enumerate(counts) if low < count <= high]
        if chosen:
            score = bleu([texts[index] for index in chosen], [references[index] for index in chosen], **options)
            span = f"{low + 1} to {high}"
            parts = {"words": sum(counts[index] for index in chosen) / len(chosen), "texts": float(len(chosen))}
            signature = f"{score.signature}|sources:{span} words|texts:{len(chosen)}"
            scores.append(replace(score, name=f"BLEU, {span} words", signature=signature, parts=parts))
    return scores


def chrf(texts: Sequence[str], references: References, *, word_order: int = 0) -> ScoreRecord:
    """chrF of a corpus (Popović 2015), 0 to 100; `word_order` 2 is chrF++ (Popović 2017). Raises as `bleu`."""
    if word_order < 0:
        raise UserError(f"word_order must be 0 (chrF), 2 (chrF++) or another length of n-grams, got {word_order}")
    return _corpus_score("chrF" + "+" * word_order, _sacrebleu("chrf").CHRF(word_order=word_order), texts, references)


def ter(texts: Sequence[str], references: References, *, case_sensitive: bool = False) -> ScoreRecord:
    """Translation edit rate of texts (Snover et al. 2006): edits per 100 words, lower is better; raises as `bleu`."""
    return _corpus_score("TER", _sacrebleu("ter").TER(case_sensitive=case_sensitive), texts, references)


def exact_match(texts: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """The percentage of texts that equal their reference exactly. Raises as `bleu`."""
    check_pairs(texts, references, "texts")
    correct = sum(text == reference for text, reference in zip(texts, references))
    return ScoreRecord("exact", 100 * correct / len(texts), f"items:{len(texts)}")


def answer_exact_match(answers: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """The percentage of answers that equal their reference when both are normalized; "" is no answer."""
    check_pairs(answers, references, "answers")
    correct = sum(normalized_answer(answer) == normalized_answer(other) for answer, other in zip(answers, references))
    return ScoreRecord("exact match", 100 * correct / len(answers), f"items:{len(answers)}")


def answer_f1(answers: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """The mean F1 of the words of an answer and of its reference, 0 to 100; where either is empty, whether both are."""
    check_pairs(answers, references, "answers")
    total = sum(
        _word_f1(normalized_answer(a).split(), normalized_answer(b).split()) for a, b in zip(answers, references)
    )
    return ScoreRecord("answer F1", 100 * total / len(answers), f"items:{len(answers)}")


def normalized_answer(text: str) -> str:
    """A text in lower case without punctuation, articles and repeated white space.

    As SQuAD's script compares answers (Rajpurkar et al. 2016, section 6.1)."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def word_error_rate(texts: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """Edits of words in relation to the words of all references, in per cent (may exceed 100); lower is better.

    `parts` are the substitutions, deletions and insertions among them. Raises UserError for unequal lengths, for
    references without any word, and without the package jiwer."""
    check_pairs(texts, references, "transcripts")
    result = _jiwer().process_words(*_non_empty(references, texts))
    counts = (result.substitutions, result.deletions, result.insertions)
    return _error_rate("word_error_rate", 100 * result.wer, counts, result.hits)


def character_error_rate(texts: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """As `word_error_rate`, for characters, spaces included."""
    check_pairs(texts, references, "transcripts")
    result = _jiwer().process_characters(*_non_empty(references, texts))
    counts = (result.substitutions, result.deletions, result.insertions)
    return _error_rate("character_error_rate", 100 * result.cer, counts, result.hits)


def _corpus_score(name: str, metric: "Metric", texts: Sequence[str], references: References) -> ScoreRecord:
    # a list of texts is one set of references; a list of lists is several
    single = [reference for reference in references if isinstance(reference, str)]
    if len(single) == len(references):
        sets = [single]
    else:
        sets = [list(reference_set) for reference_set in references]
    for reference_set in sets:
        check_pairs(texts, reference_set, "texts")
    result = metric.corpus_score(list(texts), sets)
    precisions = {f"precision {n}": value for n, value in enumerate(getattr(result, "precisions", []), 1)}
    return ScoreRecord(name, float(result.score), metric.get_signature().format(), parts=precisions)


def _sacrebleu(metric: str) -> Any:
    """The module of one of sacrebleu's metrics. Raises UserError if sacrebleu is not installed."""
    try:
        return importlib.import_module(f"sacrebleu.metrics.{metric}")
    except ImportError:
        raise UserError("BLEU, chrF and TER need sacrebleu: pip install 'manyformer[translate]'") from None


def _word_f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = sum((Counter(answer) & Counter(reference)).values())
    return 2 * common / (len(answer) + len(reference))


def _error_rate(name: str, value: float, counts: tuple[int, int, int], hits: int) -> ScoreRecord:
    total = hits + counts[0] + counts[1]
    kinds = ("substitutions", "deletions", "insertions")
    parts = {kind: 100 * count / total for kind, count in zip(kinds, counts)}
    version = getattr(_jiwer(), "__version__", "4")
    return ScoreRecord(name, value, f"references:{total}|jiwer:{version}", parts=parts)


def _non_empty(references: Sequence[str], texts: Sequence[str]) -> tuple[list[str], list[str]]:
    if not any(reference.strip() for reference in references):
        raise UserError("the references have no words, so that there is no rate of errors")
    return list(references), list(texts)


def _jiwer() -> ModuleType:
    try:
        import jiwer
    except ImportError:
        raise UserError("error rates need the package jiwer: pip install 'manyformer[audio]'") from None
    module: ModuleType = jiwer
    return module
