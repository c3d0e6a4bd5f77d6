"""Equal numbers of parameters: a size keyword of each case is solved for, so that all models are as large as one."""

import functools
import json
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.config import RunConfig
from manyformer.config.comparison import Comparison, ComparisonCase
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.model_summary import count_parameters, nearest_size
from manyformer.recipes.parts.registry import build_on_meta

TOLERANCE = 0.03
"""The largest difference of the numbers of parameters, as a share of the reference's."""

MAX_SIZE = 1 << 16
"""The largest value of a size keyword that is tried."""

_VOCABS = (64, 128)
"""The vocabularies of the models whose parameters are counted: the same for all tasks, which share the counts."""


class SizeKeyword(NamedTuple):
    """A keyword that decides a model's size: even, or a multiple of twice another keyword if the recipe has that."""

    name: str
    divisor: str | None = None


SIZE_KEYWORDS = (SizeKeyword("ff_dim"), SizeKeyword("hidden_dim"), SizeKeyword("dim", "heads"))
"""The keywords that are solved for: the first that a recipe has and that suffices."""


def match_sizes(comparison: Comparison, reference: str) -> Comparison:
    """The comparison with each case's model as large as that of the case `reference`.

    Counted are the parameters besides those for each token of the vocabulary (embedding and output). A case whose own
    settings are within `TOLERANCE` is left as it is, and one that starts from the weights of another case gets the size
    of that case. Raises UserError where no size keyword suffices."""
    target = body_parameters(comparison.case(reference).run)
    solve = functools.cache(lambda name: _solve_case(comparison.case(name), target, reference))
    return replace(
        comparison, cases=tuple(_resized(case, solve(_first_case(comparison, case))) for case in comparison.cases)
    )


def _first_case(comparison: Comparison, case: ComparisonCase) -> str:
    """The name of the case from whose weights, over any number of trainings, this one starts; its own if from none."""
    while case.init_from_case is not None:
        case = comparison.case(case.init_from_case)
    return case.name


def body_parameters(run: RunConfig) -> int:
    """The number of parameters of a run's model besides those for each token of the vocabulary."""
    parameters = get_recipe(run.recipe).signature.parameters
    keywords = {**run.data.expected_keywords(set(parameters)).keywords, **run.model}
    # models of several tasks differ in their vocabularies alone, and are counted once
    if isinstance(keywords.get("vocab"), int):
        keywords["vocab"] = _VOCABS[0]
    return _count_body(run.recipe, json_text(keywords, sort_keys=True))


@functools.cache
def _count_body(recipe: str, keywords_text: str) -> int:
    keywords = json.loads(keywords_text)
    if "vocab" not in keywords:
        return count_parameters(build_on_meta(recipe, keywords))
    first, second = (count_parameters(build_on_meta(recipe, keywords | {"vocab": vocab})) for vocab in _VOCABS)
    # linear in the vocabulary: embedding, output projection and its bias, tied or not
    return first - _VOCABS[0] * (second - first) // (_VOCABS[1] - _VOCABS[0])


def _solve_case(case: ComparisonCase, target: int, reference: str) -> dict[str, int]:
    """The value of the size keyword with which the case is as large as `target`; none if it is as it stands."""
    count = body_parameters(case.run)
    if is_as_large(count, target):
        return {}
    defaults = get_recipe(case.run.recipe).signature.parameters
    for keyword in SIZE_KEYWORDS:
        value = None
        if keyword.name in defaults:
            value = _solve_keyword(case.run, keyword, target)
        if value is not None:
            return {keyword.name: value}
    names = " or ".join(keyword.name for keyword in SIZE_KEYWORDS)
    raise UserError(
        f"case {case.name}: it has {count:,} parameters besides its embedding, {reference} has {target:,}, and no "
        f"value of {names} brings it within {TOLERANCE:.0%}; set other sizes in cases.{case.name}.model"
    )


def _solve_keyword(run: RunConfig, keyword: SizeKeyword, target: int) -> int | None:
    """The value of a size keyword with which a run's model is as large as `target`; None if no value is."""
    parameters = get_recipe(run.recipe).signature.parameters
    values = {name: run.model.get(name, parameter.default) for name, parameter in parameters.items()}
    step = 2
    if keyword.divisor is not None:
        # an even width of each head, for rotations
        step = 1
        if keyword.divisor in values:
            step = 2 * int(values[keyword.divisor])
    # a width that follows from others is usually that of a feed-forward layer
    size = values[keyword.name]
    present = int(4 * values["dim"] if size is None else size)

    def count(number: int) -> int:
        return body_parameters(_with_sizes(run, {keyword.name: number * step}))

    try:
        # from the present size, which is close: each count builds a model
        number = nearest_size(count, target, MAX_SIZE // step, start=max(1, present // step))
        if is_as_large(count(number), target):
            return number * step
        return None
    except ValueError:
        # the recipe refuses some of the values
        return None


def is_as_large(count: int, target: int) -> bool:
    """Whether two numbers of parameters differ by at most `TOLERANCE`."""
    return abs(count - target) <= TOLERANCE * target


def _with_sizes(run: RunConfig, sizes: dict[str, int]) -> RunConfig:
    return run.model_copy(update={"model": {**run.model, **sizes}})


def _resized(case: ComparisonCase, sizes: dict[str, int]) -> ComparisonCase:
    """The case with these values of size keywords in all its runs."""
    if not sizes:
        return case
    return replace(case, trials=tuple(trial.with_runs(partial(_with_sizes, sizes=sizes)) for trial in case.trials))
