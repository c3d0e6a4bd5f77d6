"""Scores of texts against references: translations (by sacrebleu), answers to questions, transcripts (by jiwer)."""

import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from manyformer.base.errors import UserError
from manyformer.models.scores.record import ScoreRecord, check_pairs

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric


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
