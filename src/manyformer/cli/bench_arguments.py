"""The words of `bench`: recipes with keywords of their own, keywords for all, and ranges of lengths."""

from typing import Any, get_args

import typer

from manyformer.bench import WHATS, BenchCandidate, BenchPrecision
from manyformer.cli.model_arguments import read_keywords
from manyformer.cli.split_arguments import with_options
from manyformer.config.overrides import parse_overrides
from manyformer.errors import UserError, UserErrors, nearest
from manyformer.recipes import get_recipe

CHOICES: dict[str, tuple[str, ...]] = {"what": WHATS, "precision": get_args(BenchPrecision)}


def read_candidates(context: typer.Context, words: list[str]) -> tuple[list[BenchCandidate], dict[str, Any]]:
    """The candidates, and the keywords for all of them. Raises UserErrors."""
    names: list[str] = []
    rest: list[str] = []
    for word in words:
        # a value after `--key` is no name
        follows = bool(rest) and rest[-1].startswith("--") and "=" not in rest[-1]
        head = word.partition("=")[0]
        (rest if word.startswith("--") or follows or ("=" in word and ":" not in head) else names).append(word)
    keywords = with_options(context, rest, lambda: _shared(rest))
    candidates = [_candidate(name) for name in names]
    _refuse_unknown(context, rest, keywords, candidates)
    return candidates, keywords


def _shared(words: list[str]) -> dict[str, Any]:
    found, mistakes = parse_overrides(words)
    if mistakes:
        raise UserErrors(map(str, mistakes))
    return {override.key.removeprefix("model."): override.value for override in found}


def _candidate(word: str) -> BenchCandidate:
    name, _, given = word.partition(":")
    return BenchCandidate(word, name, read_keywords(get_recipe(name), [part for part in given.split(",") if part]))


def _refuse_unknown(
    context: typer.Context, words: list[str], keywords: dict[str, Any], candidates: list[BenchCandidate]
) -> None:
    """A keyword for all must be known to one of them at least: else it would be left out without a word."""
    known = {name for candidate in candidates for name in get_recipe(candidate.recipe).signature.parameters}

    def refuse() -> None:
        wrong = [f"--{name}: no such keyword; {nearest(name, known)}" for name in keywords if name not in known]
        if wrong:
            raise UserErrors(wrong)

    with_options(context, words, refuse)


def read_lengths(text: str) -> list[int]:
    """`256:2048,3000` as lengths: a range doubles, commas separate. Raises UserError."""
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        if not first.strip().isdecimal() or (colon and not last.strip().isdecimal()):
            raise UserError(f"--lengths '{text}': '{part}' is neither a number nor a range such as 256:2048")
        length, end = int(first), int(last) if colon else int(first)
        if not 1 <= length <= end:
            raise UserError(f"--lengths '{text}': the range '{part}' is empty; write the smaller number first")
        while length <= end:
            found.append(length)
            length *= 2
    return found


def named(text: str, kind: str) -> list[Any]:
    """Words among a few, separated by commas. Raises UserError with the nearest."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in CHOICES[kind]:
            raise UserError(f"--{kind} '{word}' does not exist; {nearest(word, CHOICES[kind])}")
    if not words:
        raise UserError(f"--{kind} is empty; known: {', '.join(CHOICES[kind])}")
    return words
