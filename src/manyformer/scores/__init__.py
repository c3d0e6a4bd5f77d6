"""Scores as records: `.value`, `.signature` (how it was computed), and a readable line by `str`."""

from manyformer.scores.answer_scores import answer_exact_match, answer_f1
from manyformer.scores.classification_scores import accuracy, f1
from manyformer.scores.likelihood_scores import (
    bits_per_byte,
    bits_per_character,
    bits_per_dimension,
    perplexity,
    row_exact_match,
    token_accuracy,
)
from manyformer.scores.rank_key import is_comparable, rank_key
from manyformer.scores.record import ScoreKind, ScoreRecord
from manyformer.scores.return_scores import mean_length, mean_return, success_rate
from manyformer.scores.text_scores import bleu, bleu_by_length, chrf, exact_match, ter
from manyformer.scores.transcript_scores import character_error_rate, word_error_rate

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
