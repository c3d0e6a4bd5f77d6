"""The summary of a run's model and data for `--dry-run`."""

from typing import NamedTuple

from manyformer.cli.console import format_count, print_json, print_result
from manyformer.config import RunConfig
from manyformer.data.kind import OpenRequest
from manyformer.data.opened import DataSurvey
from manyformer.data.opening import survey_data
from manyformer.errors import UserError
from manyformer.model_summary import count_parameters, forward_cost, module_rows
from manyformer.models import Model
from manyformer.recipes import get_recipe
from manyformer.recipes.encoder_heads import HEAD, expected_head
from manyformer.recipes.registry import build_on_meta
from manyformer.system.temporary_folders import temporary_folder
from manyformer.train.build_model import surveyed_model
from manyformer.train.optimizers import weight_decay_groups


class PlannedModel(NamedTuple):
    """A model without weights, what was assumed of its data (None: nothing), and the tokens of the longest row."""

    model: Model
    assumption: str | None
    row_length: int


def print_summary(run: RunConfig) -> None:
    """Print the model and the data as comments, so that the output of `--dry-run` is still a run file."""
    expected = _expected_model(run)
    try:
        survey = _survey(run)
    except UserError:
        # the size of the model can be told without the data
        _print_model(run, expected)
        raise
    _print_model(run, _with_data(run, survey, expected))
    for subject, text in survey.lines:
        print_result(*(f"# {subject:<8} {line}" for line in text.splitlines()))
    print_result("# nothing was trained: this was --dry-run")


def print_summary_as_json(run: RunConfig) -> None:
    """Print the run, the size of its model and the facts of its data as one JSON document."""
    survey = _survey(run)
    planned = _with_data(run, survey, _expected_model(run))
    print_json(
        {
            "run": run.model_dump(mode="json", by_alias=True),
            "model": {"parameters": count_parameters(planned.model), "assumption": planned.assumption},
            "data": {
                "lines": [text for _, text in survey.lines],
                "summary": None if survey.summary is None else survey.summary.as_json(),
            },
        }
    )


def _print_model(run: RunConfig, planned: PlannedModel) -> None:
    model = planned.model
    assumption = planned.assumption or "with this data"
    print_result()
    print_result(f"# {get_recipe(run.recipe).card.title}: {count_parameters(model):,} parameters ({assumption})")
    for part in module_rows(model):
        if part.level < 2 and part.parameters:
            times = f" x {part.times}" if part.times > 1 else ""
            print_result(f"#   {'  ' * part.level}{part.name}{times} {part.kind}: {part.parameters:,}")
    decayed, undecayed = (sum(weight.numel() for weight in group) for group in weight_decay_groups(model))
    print_result(
        f"# weight decay: {decayed:,} parameters decay, {undecayed:,} do not (biases, norms, tables, positions)"
    )
    # a row of the data is as long as the model allows at most, unlike the one that is assumed
    length = min(planned.row_length, model.max_length or planned.row_length)
    step = 3 * forward_cost(model, length).flops * run.batch.tokens * run.batch.accumulate / length
    print_result(f"# a step: {run.batch.tokens * run.batch.accumulate:,} tokens, about {format_count(step)}FLOP")


def _expected_model(run: RunConfig) -> PlannedModel:
    """The model as far as it is known without the data."""
    recipe = get_recipe(run.recipe)
    expected = run.data.expected_keywords(set(recipe.signature.parameters) - set(run.model))
    if HEAD in recipe.signature.parameters:
        head = expected_head(recipe.card.task.variant(run.data.kind))
    else:
        head = {}
    model = build_on_meta(run.recipe, {**head, **run.model, **expected.keywords})
    return PlannedModel(model, expected.assumption, expected.row_length)


def _with_data(run: RunConfig, survey: DataSurvey, expected: PlannedModel) -> PlannedModel:
    """The model as the data makes it, if the look at it has read all of it."""
    model = surveyed_model(run, survey, expected.model)
    if survey.opened is None:
        return expected
    longest = max((limit.length for limit in survey.length_limits), default=expected.row_length)
    return PlannedModel(model, None, longest)


def _survey(run: RunConfig) -> DataSurvey:
    """A look at the data, which leaves no files."""
    task = get_recipe(run.recipe).card.task.variant(run.data.kind)
    with temporary_folder() as folder:
        request = OpenRequest(run.batch.tokens, folder, run.seed)
        return survey_data(run.data, task.data_forms[run.data.kind], request)
