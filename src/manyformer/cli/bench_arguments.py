"""The arguments of `bench`: recipes with their keywords, keywords for all, and ranges of lengths."""

from typing import Any, get_args

from manyformer.bench import BENCH_KINDS, BenchCandidate, BenchPrecision
from manyformer.cli.model_arguments import read_keywords
from manyformer.cli.split_arguments import split_commas
from manyformer.config.overrides import parse_overrides
from manyformer.errors import UserError, UserErrors, suggest_names
from manyformer.recipes import get_recipe

CHOICES: dict[str, tuple[str, ...]] = {"what": BENCH_KINDS, "precision": get_args(BenchPrecision)}


def read_candidates(arguments: list[str]) -> tuple[list[BenchCandidate], dict[str, Any]]:
    """The candidates, and the keywords for all of them. Raises UserErrors."""
    names: list[str] = []
    keyword_arguments: list[str] = []
    for argument in arguments:
        # the value of `--key` is not a recipe's name
        previous = keyword_arguments[-1] if keyword_arguments else ""
        is_value = previous.startswith("--") and "=" not in previous
        is_setting = "=" in argument and ":" not in argument.partition("=")[0]
        is_keyword = argument.startswith("--") or is_value or is_setting
        (keyword_arguments if is_keyword else names).append(argument)
    candidates = [_candidate(name) for name in names]
    return candidates, _shared_keywords(keyword_arguments, candidates)


def _candidate(argument: str) -> BenchCandidate:
    name, _, keywords = argument.partition(":")
    return BenchCandidate(argument, name, read_keywords(get_recipe(name), split_commas(keywords)))


def _shared_keywords(arguments: list[str], candidates: list[BenchCandidate]) -> dict[str, Any]:
    """The keywords for all candidates. Raises UserErrors for those that none has: they would be ignored silently."""
    overrides, mistakes = parse_overrides(arguments)
    if mistakes:
        raise UserErrors(map(str, mistakes))
    keywords = {override.key.removeprefix("model."): override.value for override in overrides}
    valid_names = {name for candidate in candidates for name in get_recipe(candidate.recipe).signature.parameters}
    unknown = [name for name in keywords if name not in valid_names]
    if unknown:
        raise UserErrors(f"--{name}: no such keyword; {suggest_names(name, valid_names)}" for name in unknown)
    return keywords


def read_lengths(text: str) -> list[int]:
    """The lengths in a text such as `256:2048,3000`: a range doubles, commas separate. Raises UserError."""
    lengths: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        if not first.strip().isdecimal() or (colon and not last.strip().isdecimal()):
            raise UserError(f"--lengths '{text}': '{part}' is neither a number nor a range such as 256:2048")
        length = int(first)
        end = int(last) if colon else int(first)
        if not 1 <= length <= end:
            raise UserError(f"--lengths '{text}': the range '{part}' is empty; write the smaller number first")
        while length <= end:
            lengths.append(length)
            length *= 2
    return lengths


def read_choices(text: str, option: str) -> list[Any]:
    """The comma-separated choices of an option. Raises UserError with the nearest valid one."""
    choices = split_commas(text)
    for choice in choices:
        if choice not in CHOICES[option]:
            raise UserError(f"--{option} '{choice}' does not exist; {suggest_names(choice, CHOICES[option])}")
    if not choices:
        raise UserError(f"--{option} is empty; choose among {', '.join(CHOICES[option])}")
    return choices
