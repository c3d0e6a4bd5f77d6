"""Scores as records: `.value`, `.signature` (how it was computed), and a readable line by `str`."""

from manyformer.models.scores.prediction_scores import (
    accuracy,
    bits_per_byte,
    bits_per_character,
    bits_per_dimension,
    f1,
    perplexity,
    row_exact_match,
    token_accuracy,
)
from manyformer.models.scores.record import ScoreKind, ScoreRecord, is_comparable, rank_key
from manyformer.models.scores.return_scores import mean_length, mean_return, success_rate
from manyformer.models.scores.text_scores import (
    answer_exact_match,
    answer_f1,
    bleu,
    bleu_by_length,
    character_error_rate,
    chrf,
    exact_match,
    ter,
    word_error_rate,
)

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
