"""Scores made of a summed negative log-likelihood in nats and of counts."""

import math

from manyformer.errors import UserError
from manyformer.scores.record import ScoreRecord


def perplexity(nats: float, count: int) -> ScoreRecord:
    """e to the mean negative log-likelihood of a token; without label smoothing, or it is no perplexity."""
    mean = _mean(nats, count, "token")
    # a hopeless model is infinitely surprised rather than an error
    value = math.exp(mean) if mean < 700 else math.inf
    return ScoreRecord("perplexity", value, f"per:token|tokens:{count}", parts={"nats": mean})


def bits_per_character(nats: float, characters: int) -> ScoreRecord:
    """Bits that the text costs, over its characters (Unicode code points), whatever the tokens are."""
    mean = _mean(nats, characters, "character")
    return ScoreRecord("bits per character", mean / math.log(2), f"per:character|characters:{characters}", 4)


def bits_per_byte(nats: float, size: int) -> ScoreRecord:
    """Bits that the text costs, over its bytes in UTF-8, whatever the tokens are."""
    return ScoreRecord("bits per byte", _mean(nats, size, "byte") / math.log(2), f"per:byte|bytes:{size}", 4)


def bits_per_dimension(nats: float, values: int) -> ScoreRecord:
    """Bits that images cost, over their values: pixels times channels."""
    return ScoreRecord(
        "bits per dimension", _mean(nats, values, "value") / math.log(2), f"per:value|values:{values}", 4
    )


def token_accuracy(correct: int, count: int) -> ScoreRecord:
    """How many of 100 tokens were the likeliest, given the true ones before them."""
    if not 0 <= correct <= count:
        raise UserError(f"correct must be from 0 to the {count} tokens, got {correct}")
    return ScoreRecord("token accuracy", 100 * _mean(correct, count, "token"), f"per:token|tokens:{count}")


def _mean(total: float, count: int, what: str) -> float:
    if count < 1:
        raise UserError(f"there is no {what} to score: the count is {count}")
    return total / count
