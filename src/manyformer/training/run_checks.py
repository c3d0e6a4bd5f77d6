"""What can be known of a run before it trains: its model without weights, a look at its data, and whether both fit.

`manyformer train --dry-run` prints it, a training begins with the part that takes no time, and a comparison checks all
of its cases by it."""

import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.base.system import temporary_folder
from manyformer.config import RunConfig
from manyformer.config.data_sections.data_section import ExpectedData
from manyformer.data import survey_data
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.data.pipeline.opened import DataSurvey, check_lengths, row_limit
from manyformer.models import Model
from manyformer.models.model_files import read_spec
from manyformer.models.tasks.masked_language_modelling import HEAD, expected_head
from manyformer.nn.batches import Batch
from manyformer.nn.runtime.devices import check_memory_of, check_model_fits
from manyformer.recipes import build, get_recipe
from manyformer.recipes.parts.registry import build_on_meta
from manyformer.training.build_model import (
    adapt_model,
    choose_device,
    model_keywords,
    takes_length_of_data,
    training_copies,
)
from manyformer.training.checkpoints import find_branch
from manyformer.training.init_from import check_tokenizers
from manyformer.training.layers import chosen_layers
from manyformer.training.parameter_rules import ParameterRule, parameter_rules
from manyformer.training.process_group import SINGLE_PROCESS_GROUP
from manyformer.training.run_folder import model_folder
from manyformer.training.schedules import Schedule, make_schedule
from manyformer.training.width_transfer import rate_scales


class PlannedModel(NamedTuple):
    """A model without weights, what was assumed of its data (None: nothing), and the tokens of the longest row."""

    model: Model
    assumption: str | None
    row_length: int


def expected_model(run: RunConfig) -> PlannedModel:
    """The model as far as it is known without the data."""
    expected = _expected_data(run)
    model = build_on_meta(run.recipe, _expected_keywords(run, expected))
    return PlannedModel(model, expected.assumption, expected.row_length)


def _expected_data(run: RunConfig) -> ExpectedData:
    recipe = get_recipe(run.recipe)
    return run.data.expected_keywords(set(recipe.signature.parameters) - set(run.model))


def _expected_keywords(run: RunConfig, expected: ExpectedData) -> dict[str, Any]:
    recipe = get_recipe(run.recipe)
    head = {}
    if HEAD in recipe.signature.parameters:
        head = expected_head(recipe.card.task.variant(run.data.kind))
    return {**head, **run.model, **expected.keywords}


def check_before_data(run: RunConfig, device: torch.device) -> None:
    """Raise UserError for a model beyond the memory of the device, and for rows of text that it does not allow.

    Takes no time for small models, and reads nothing."""
    keywords = _expected_keywords(run, _expected_data(run))
    build_run = partial(build, run.recipe, **keywords)
    check_model_fits(build_run, run.recipe, keywords, copies=training_copies(run), device=device)
    max_length = run.model.get("max_length")
    if run.data.fills_rows and type(max_length) is int and max_length < run.data.row_length:
        # the model decides: with relative positions it may have no greatest length
        check_lengths([row_limit(run.data.row_length)], build_on_meta(run.recipe, keywords).max_length)


def planned_rules(run: RunConfig, model: Model) -> list[ParameterRule]:
    """How the run trains each weight of its planned model, adapters included. Raises UserError as a training does."""
    adapted = copy.deepcopy(model)
    adapt_model(adapted, run)
    return parameter_rules(adapted, run.optim, rate_scales(run, model))


def check_layers(run: RunConfig, model: Model) -> None:
    """Raise UserError for a choice of layers that `model` does not have."""
    if run.activation_checkpointing:
        chosen_layers(model, run.activation_checkpointing)


def check_memory(run: RunConfig, model: Model) -> None:
    """Raise OutOfMemory if the model cannot be trained in the memory of the run's device, UserError without a device.

    `model` has no storage for its weights."""
    device = choose_device(run.device, SINGLE_PROCESS_GROUP)
    check_memory_of(model, run.recipe, copies=training_copies(run), device=device)


class RunSurvey(NamedTuple):
    """A look at the data of a run, and the first batch of data that was read as a whole."""

    data: DataSurvey
    first_batch: Batch | None = None

    def describe_batch(self) -> str | None:
        """The shape of the first batch, as rows by what each of them has; None without one."""
        tensors = (part for part in self.first_batch or () if isinstance(part, Tensor) and part.ndim > 1)
        tensor = next(tensors, None)
        if tensor is None:
            return None
        rows, *shape = tensor.shape
        return f"{rows:,} rows of {' x '.join(map(str, shape))}"


def survey_run(run: RunConfig) -> RunSurvey:
    """A look at the data, which leaves no files. Raises UserError for what training would refuse."""
    task = get_recipe(run.recipe).card.task.variant(run.data.kind)
    with temporary_folder() as folder:
        request = OpenRequest(run.batch.tokens, folder, run.seed)
        survey = survey_data(run.data, task.data_forms[run.data.kind], request)
        first_batch = None
        # a batch that depends on the weights of the moment is made by training alone
        if survey.opened is not None and survey.opened.train.reads_ahead:
            # while its files are there
            first_batch = next(survey.opened.train)
    return RunSurvey(survey, first_batch)


def planned_model(run: RunConfig, survey: DataSurvey, expected: PlannedModel) -> PlannedModel:
    """The model as the data makes it where the look at it has read all of it; else `expected`.

    Raises UserError if training would refuse the model with this data."""
    if survey.opened is None:
        if not takes_length_of_data(run):
            check_lengths(survey.length_limits, expected.model.max_length)
        return expected
    model = build_on_meta(run.recipe, model_keywords(run, survey.opened))
    survey.opened.check_length(model.max_length)
    if run.init_from is not None:
        check_tokenizers(model_folder(run.init_from), survey.opened)
    longest = max((limit.length for limit in survey.length_limits), default=expected.row_length)
    return PlannedModel(model, None, longest)


def planned_schedule(run: RunConfig, model: Model) -> Schedule:
    """The learning rates of a run that has not begun. Raises UserError for a checkpoint to branch from that is none."""
    branch = None
    if run.branch_from is not None:
        assert run.out is not None
        checkpoint = find_branch(run.branch_from, Path(run.out), SINGLE_PROCESS_GROUP)
        branch = checkpoint.state.train_state.amounts
    return make_schedule(run, width=model.spec.keywords.get("dim"), branch=branch)


class RunChecker:
    """Finds what will make runs fail before they train; runs with equal data share one look at it.

    `split` is what their models will be scored on."""

    def __init__(self, split: str) -> None:
        self.split = split
        self._surveys: dict[str, DataSurvey | UserError] = {}

    def check(self, run: RunConfig, *, with_data: bool = True) -> None:
        """Raise UserError for what can be known: the model, the device, the model to begin with, the data.

        Without its data, where that is not there yet, the model is built as far as it is known."""
        if run.init_from is not None and with_data:
            read_spec(model_folder(run.init_from))
        expected = expected_model(run)
        check_memory(run, expected.model)
        check_layers(run, expected.model)
        if not with_data:
            return
        survey = self._survey(run)
        check_memory(run, planned_model(run, survey, expected).model)
        if survey.opened is not None and self.split == "test" and survey.opened.test is None:
            raise UserError(f"split is test, but the data of {run.recipe} has no test split (data.test)")

    def _survey(self, run: RunConfig) -> DataSurvey:
        form = get_recipe(run.recipe).card.task.variant(run.data.kind).data_forms[run.data.kind]
        key = json_text([form, run.batch.tokens, run.data.model_dump(mode="json")])
        if key not in self._surveys:
            try:
                self._surveys[key] = survey_run(run).data
            except UserError as error:
                self._surveys[key] = error
        survey = self._surveys[key]
        if isinstance(survey, UserError):
            raise survey
        return survey
