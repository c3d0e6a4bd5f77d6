"""Scores of transcripts against what was said, computed by jiwer."""

from collections.abc import Sequence
from types import ModuleType

from manyformer.errors import UserError
from manyformer.scores.record import ScoreRecord, check_pairs


def word_error_rate(texts: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """Edits of words in relation to the words of all references, in per cent (may exceed 100); lower is better.

    `parts` are the substitutions, deletions and insertions among them. Raises UserError for unequal lengths, for
    references without any word, and without the package jiwer."""
    check_pairs(texts, references, "transcripts")
    result = _jiwer().process_words(*_non_empty(references, texts))
    counts = (result.substitutions, result.deletions, result.insertions)
    return _record("word_error_rate", 100 * result.wer, counts, result.hits)


def character_error_rate(texts: Sequence[str], references: Sequence[str]) -> ScoreRecord:
    """As `word_error_rate`, for characters, spaces included."""
    check_pairs(texts, references, "transcripts")
    result = _jiwer().process_characters(*_non_empty(references, texts))
    counts = (result.substitutions, result.deletions, result.insertions)
    return _record("character_error_rate", 100 * result.cer, counts, result.hits)


def _record(name: str, value: float, counts: tuple[int, int, int], hits: int) -> ScoreRecord:
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
