"""Scores as small records: `.value`, `.signature` (how exactly it was computed), and a line for people by `str`."""

from manyformer.scores.classes import accuracy, f1
from manyformer.scores.likelihood import (
    bits_per_byte,
    bits_per_character,
    bits_per_dimension,
    perplexity,
    token_accuracy,
)
from manyformer.scores.record import Score
from manyformer.scores.texts import bleu, chrf, exact, ter

__all__ = [
    "Score",
    "accuracy",
    "bits_per_byte",
    "bits_per_character",
    "bits_per_dimension",
    "bleu",
    "chrf",
    "exact",
    "f1",
    "perplexity",
    "ter",
    "token_accuracy",
]
