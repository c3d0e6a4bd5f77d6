"""The summary of a run's model and data for `--dry-run`."""

from typing import Any

from manyformer.cli.console import format_count, print_json, print_result
from manyformer.config import RunConfig
from manyformer.data.kind import OpenRequest
from manyformer.data.opened import DataSurvey
from manyformer.data.opening import survey_data
from manyformer.model_summary import build_on_meta, count_parameters, forward_cost, module_rows
from manyformer.recipes import get_recipe
from manyformer.recipes.encoder_heads import HEAD, expected_head
from manyformer.system.temporary_folders import temporary_folder
from manyformer.train.build_model import check_survey
from manyformer.train.optimizers import weight_decay_groups


def print_summary(run: RunConfig) -> None:
    """Print the model and the data as comments, so that the output of `--dry-run` is still a run file."""
    recipe = get_recipe(run.recipe)
    model, expected = _expected_model(run)
    survey = _survey(run)
    check_survey(run, survey, model)
    print_result()
    print_result(f"# {recipe.card.title}: {count_parameters(model):,} parameters ({expected.assumption})")
    for part in module_rows(model):
        if part.level < 2 and part.parameters:
            times = f" x {part.times}" if part.times > 1 else ""
            print_result(f"#   {'  ' * part.level}{part.name}{times} {part.kind}: {part.parameters:,}")
    decayed, undecayed = (sum(weight.numel() for weight in group) for group in weight_decay_groups(model))
    print_result(
        f"# weight decay: {decayed:,} parameters decay, {undecayed:,} do not (biases, norms, tables, positions)"
    )
    # a row of the data is as long as the model allows at most, unlike the one that is assumed
    length = min(expected.row_length, model.max_length or expected.row_length)
    step = 3 * forward_cost(model, length).flops * run.batch.tokens * run.batch.accumulate / length
    print_result(f"# a step: {run.batch.tokens * run.batch.accumulate:,} tokens, about {format_count(step)}FLOP")
    for subject, text in survey.lines:
        print_result(*(f"# {subject:<8} {line}" for line in text.splitlines()))
    print_result("# nothing was trained: this was --dry-run")


def print_summary_as_json(run: RunConfig) -> None:
    """Print the run, the size of its model and the facts of its data as one JSON document."""
    model, expected = _expected_model(run)
    survey = _survey(run)
    check_survey(run, survey, model)
    print_json(
        {
            "run": run.model_dump(mode="json", by_alias=True),
            "model": {"parameters": count_parameters(model), "assumption": expected.assumption},
            "data": {
                "lines": [text for _, text in survey.lines],
                "summary": None if survey.summary is None else survey.summary.as_json(),
            },
        }
    )


def _expected_model(run: RunConfig) -> tuple[Any, Any]:
    """The model as far as it is known without the data, and what was assumed."""
    recipe = get_recipe(run.recipe)
    expected = run.data.expected_keywords(set(recipe.signature.parameters) - set(run.model))
    head = expected_head(recipe.card.task.variant(run.data.kind)) if HEAD in recipe.signature.parameters else {}
    return build_on_meta(run.recipe, {**head, **run.model, **expected.keywords}), expected


def _survey(run: RunConfig) -> DataSurvey:
    """A look at the data, which leaves no files."""
    task = get_recipe(run.recipe).card.task.variant(run.data.kind)
    with temporary_folder() as folder:
        request = OpenRequest(run.batch.tokens, folder, run.seed)
        return survey_data(run.data, task.data_forms[run.data.kind], request)
