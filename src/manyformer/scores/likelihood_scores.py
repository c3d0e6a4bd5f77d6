"""Scores from a summed negative log-likelihood in nats and from counts."""

import math

from manyformer.errors import UserError
from manyformer.scores.record import ScoreRecord


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
