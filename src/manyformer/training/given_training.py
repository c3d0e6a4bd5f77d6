"""`train` with a model as an object and data of the caller: both are made what the training of a run takes.

A module of the user's own gets a model around it, and what its data gives becomes batches. All else is the run's:
optimizer, schedules, checkpoints, metrics and scores are those of the settings, by the names of run files."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.base.keyword_checks import as_json
from manyformer.base.type_aliases import LogFn
from manyformer.config import GivenData, RunConfig
from manyformer.config.load import RecipeLookup, RunTarget, merge_run
from manyformer.config.setting_layers import SettingLayer
from manyformer.config.training_sections import BatchConfig
from manyformer.data import TokenizerPair
from manyformer.data.batching.given_feed import GivenFeed, GivenHeldOut, GivenSource
from manyformer.data.pipeline.opened import OpenedData
from manyformer.data.tokenizers.tokenizer import NoTokenizer
from manyformer.models import Model, ModelSpec
from manyformer.nn.batches import (
    IGNORE_INDEX,
    AnswerSpanBatch,
    AudioClassificationBatch,
    Batch,
    CausalLMBatch,
    ClassificationBatch,
    ImageClassificationBatch,
    MaskedLMBatch,
    Seq2SeqBatch,
    TaggingBatch,
)
from manyformer.nn.batches.given_batches import GivenBatch
from manyformer.recipes import Recipe, get_recipe
from manyformer.recipes.parts.cards import OWN_PREFIX
from manyformer.recipes.parts.own_modules import OWN_TASK, LossFn, OwnModule, register_own
from manyformer.recipes.parts.registry import task_of

ModelSource = nn.Module | Callable[..., nn.Module]
"""A module, or a class or function that gives one."""

GIVEN_KIND: str = GivenData.model_fields["kind"].default

BATCH_KINDS: dict[str, Any] = {
    "language-model": CausalLMBatch,
    "image-generation": CausalLMBatch,
    "masked-lm": MaskedLMBatch,
    "classification": ClassificationBatch,
    "tagging": TaggingBatch,
    "answer-spans": AnswerSpanBatch,
    "translation": Seq2SeqBatch,
    "image-classification": ImageClassificationBatch,
    "audio-classification": AudioClassificationBatch,
}
"""The records that batches of the library's models are made of, by the names of their tasks; others are given whole."""


@dataclass(frozen=True)
class GivenModel:
    """What a model is made of: the recipe under which a run names it, its keywords, and the built model if it is one.

    `built` is one of the library's models; the recipe of any other module knows how to build it."""

    recipe: Recipe
    keywords: Mapping[str, Any] = field(default_factory=dict)
    built: Model | None = None

    @property
    def name(self) -> str:
        return self.recipe.card.name

    @property
    def is_own(self) -> bool:
        """Whether it is a module that the library knows nothing of."""
        return self.recipe.card.task is OWN_TASK

    def as_model(self) -> Model:
        """The model of a built one, or around a module."""
        return self.recipe.build() if self.built is None else self.built

    def build(self, run: RunConfig) -> Model:
        """The model that is trained: the one that is built, or a new one, drawn from the generators of the process."""
        if self.built is not None:
            return self.built
        model = self.recipe.build(**run.model)
        if isinstance(model, OwnModule) and isinstance(model.module, Model):
            recipe = getattr(model.module, "spec", ModelSpec("one of the library", {})).recipe
            raise UserError(f"the function gives {recipe}: give the built model itself, or the name of its recipe")
        return model


def as_given_model(source: Any, loss_fn: LossFn | None = None, *, label: str | None = None) -> GivenModel:
    """The model of a recipe's name, a module, or a class or function that gives one. Raises UserError.

    `label` names a module of the user's own, by default its class or function does."""
    if isinstance(source, str):
        model = GivenModel(get_recipe(source))
    elif isinstance(source, Model):
        if not hasattr(source, "spec"):
            problem = f"this {type(source).__name__} was not built by a recipe, so a run cannot be continued with it"
            raise UserError(f"{problem}; train the models inside it")
        model = GivenModel(get_recipe(source.spec.recipe), dict(source.spec.keywords), source)
    elif isinstance(source, nn.Module):
        return GivenModel(register_own(f"{OWN_PREFIX}{label or type(source).__name__}", lambda: source, loss_fn))
    elif callable(source):
        name = getattr(source, "__name__", type(source).__name__)
        # a function without a name of its own
        if not name.isidentifier():
            name = "model"
        return GivenModel(register_own(f"{OWN_PREFIX}{label or name}", source, loss_fn))
    else:
        raise UserError(f"the model is a {type(source).__name__}; give an nn.Module, or a class that builds one")
    if loss_fn is not None:
        raise UserError(f"loss is for modules of your own; {model.name} computes its loss itself")
    return model


def run_of(
    model: GivenModel, overrides: Sequence[str] | Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> RunConfig:
    """The run of a model on data that is given, with `settings` as of a run file below the overrides.

    Raises UserErrors."""
    settings = {**(settings or {}), "recipe": model.name, "data": {"kind": GIVEN_KIND}}
    if model.keywords:
        settings["model"] = {name: as_json(value) for name, value in model.keywords.items()}
    # without the colon, which not every system allows in the name of a folder
    target = RunTarget(model.name.removeprefix(OWN_PREFIX), [SettingLayer(settings)], [])
    lookup = RecipeLookup(
        signature_of=lambda name: get_recipe(name).signature,
        task_of=lambda name: get_recipe(name).card.task,
        names=(model.name,),
    )
    run = merge_run(target, overrides, lookup)
    if run.recipe != model.name or not isinstance(run.data, GivenData):
        raise UserError("the recipe and the data are those that are given as objects; leave them out of the settings")
    if model.built is not None and run.model != settings["model"]:
        changed = next(name for name, value in run.model.items() if settings["model"].get(name) != value)
        raise UserError(f"model.{changed} cannot be set: the {model.name} that is given is built already")
    if model.is_own:
        _check_own(run)
    if run.mup.base_width is not None:
        raise UserError("mup.base_width builds a narrower model by the recipe of a run; leave it out with data=")
    if run.init_from is not None:
        raise UserError("init_from is for runs; load the weights into the model that is given")
    if run.devices > 1:
        raise UserError(
            f"devices={run.devices} starts processes that can be given neither a model nor data of this one; start the "
            f"program itself with `torchrun --nproc-per-node {run.devices} PROGRAM.py`, and set strategy=ddp"
        )
    return run


def _check_own(run: RunConfig) -> None:
    """Refuse what needs to know the layers of a module."""
    named = {
        f"activation_checkpointing={json_text(run.activation_checkpointing)}": run.activation_checkpointing,
        "compile=layers": run.compile == "layers",
        "loss.gate_penalty": run.loss.gate_penalty is not None,
        f"strategy={run.strategy}": run.strategy in ("fsdp", "context"),
    }
    for setting, is_set in named.items():
        if is_set:
            raise UserError(f"{setting} needs layers of the library's own, and {run.recipe} has others; leave it out")


class GivenTraining:
    """A run whose model and data are objects: it opens the data and builds the model in the place of the run file's."""

    def __init__(self, model: GivenModel, run: RunConfig, data: Any, eval_data: Any) -> None:
        self._model = model
        self.run = run
        self._data = data
        self._eval_data = eval_data
        self.model: Model | None = None
        """The model that is trained, once it is built."""

    @classmethod
    def of(
        cls,
        model: Any,
        overrides: Sequence[str] | Mapping[str, Any],
        data: Any,
        eval_data: Any = None,
        loss_fn: LossFn | None = None,
    ) -> "GivenTraining":
        """The training of a model with this data. Raises UserErrors."""
        if data is None:
            raise UserError("a model that is given as an object needs data=, such as a DataLoader; a run names its own")
        source = as_given_model(model, loss_fn)
        return cls(source, run_of(source, overrides), data, eval_data)

    def build_model(self, run: RunConfig, data: OpenedData, device: torch.device) -> Model:
        """The model of the run, which decides what its batches are made of."""
        self.model = self._model.build(run)
        return self.model

    def open_data(self, run: RunConfig, out: Path, log: LogFn) -> OpenedData:
        """The data that is given, opened."""
        source = GivenSource(self._data, run.batch.tokens, run.seed, shuffle=True)
        tokens = BatchConfig.model_fields["tokens"].default
        if not source.has_rows and run.batch.tokens != tokens:
            raise UserError(
                f"batch.tokens is {run.batch.tokens}, but data gives whole batches; leave it out, or give a data set, "
                "whose rows are put into batches of so many tokens"
            )
        if run.limits.epochs is not None and math.isinf(source.length):
            raise UserError("limits.epochs needs data with a length, and this has none; set limits.steps")
        held_out = None
        if self._eval_data is not None:
            held_out = GivenSource(self._eval_data, run.batch.tokens, run.seed, shuffle=False)
        else:
            _check_unscored(run)
        lines = [source.describe(), "no eval_data: nothing is scored" if held_out is None else "eval_data "]
        if held_out is not None:
            lines[1] += held_out.describe()
        return OpenedData(
            tokenizers=_tokenizers_of(self._model.built),
            train=GivenFeed(source, self._to_batch, log),
            valid=GivenHeldOut(held_out, self._to_batch),
            test=None,
            summary_lines=tuple(lines),
            length_limits=(),
            cache=out / "data",
            required_keywords={},
        )

    def _to_batch(self, raw: Any) -> Batch:
        assert self.model is not None, "the model is built before the first batch"
        return batch_of(self.model, raw)


def _tokenizers_of(built: Model | None) -> TokenizerPair:
    """The tokenizers that were saved with a model, which the trained one is saved with too; else those of no text."""
    if built is None or built.tokenizer is None:
        return TokenizerPair(NoTokenizer(), NoTokenizer())
    source, target = built.tokenizer if isinstance(built.tokenizer, tuple) else (built.tokenizer, built.tokenizer)
    return TokenizerPair(source, target, built.labels)


def _check_unscored(run: RunConfig) -> None:
    """Refuse settings that need scores where nothing is scored."""
    for name in ("patience", "target"):
        if getattr(run.evaluate, name) is not None:
            raise UserError(f"evaluate.{name} needs scores: give eval_data=")
    if run.ema.beta is not None and not run.ema.evaluate:
        raise UserError("ema.evaluate=false takes the average if it scores better: give eval_data=, or leave it out")
    if run.save.average_last:
        raise UserError("save.average_last takes the average if it scores better: give eval_data=")


def batch_of(model: Model, raw: Any) -> Batch:
    """The batch of `model` that stands for what data gave. Raises UserError."""
    if isinstance(model, OwnModule):
        return own_batch(model, raw)
    return our_batch(model, raw)


def own_batch(model: OwnModule, raw: Any) -> Batch:
    """The batch of a module of the user's own. Raises UserError for anything but tensors, pairs and mappings."""
    if isinstance(raw, GivenBatch):
        return raw
    if hasattr(raw, "target_count"):
        return raw  # type: ignore[no-any-return]
    if isinstance(raw, Tensor):
        # rows of tokens, each of which is predicted from those before it; other tensors have no target
        is_tokens = raw.ndim == 2 and not raw.is_floating_point()
        return GivenBatch((raw,), {}, raw if is_tokens else None, len(raw), 0, is_tokens).counted()
    if isinstance(raw, Mapping):
        return _named_batch(model, dict(raw))
    if isinstance(raw, list | tuple) and len(raw) == 1 and isinstance(raw[0], Tensor):
        return own_batch(model, raw[0])
    if isinstance(raw, list | tuple) and len(raw) == 2 and isinstance(raw[1], Tensor):
        first, target = raw
        arguments = tuple(first) if isinstance(first, list | tuple) else (first,)
        rows = next((len(part) for part in (*arguments, target) if isinstance(part, Tensor) and part.ndim), 1)
        return GivenBatch(arguments, {}, target, rows, 0).counted()
    raise UserError(
        f"data gave a {_describe(raw)}; a batch is a tensor of token rows, a pair (input, target), or a mapping of "
        "what the model's forward takes"
    )


def _named_batch(model: OwnModule, named: dict[str, Any]) -> Batch:
    """The batch of a mapping: the arguments of the module by name, and a target that is none of them."""
    parameters = inspect.signature(model.module.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    target = None
    for name in ("targets", "target", "labels"):
        if name in named and name not in parameters and target is None:
            target = named.pop(name)
            if name == "labels" and isinstance(target, Tensor) and target.ndim > 1:
                raise UserError(
                    f"the batch has labels for each token, which {model.spec.recipe} does not take, so that nobody "
                    "says whether they are shifted; call them targets if targets[:, i] is what output i predicts"
                )
    unknown = [name for name in named if name not in parameters and not takes_all]
    if unknown:
        raise UserError(
            f"the batch has {unknown[0]}, which the forward of {model.spec.recipe} does not take; it takes "
            f"{', '.join(parameters)}"
        )
    rows = next((len(part) for part in named.values() if isinstance(part, Tensor) and part.ndim), 1)
    return GivenBatch((), named, target, rows, 0).counted()


def our_batch(model: Model, raw: Any) -> Batch:
    """The batch of one of the library's models: its own record, or what stands for its first fields."""
    if hasattr(raw, "target_count"):
        return raw  # type: ignore[no-any-return]
    kind = BATCH_KINDS.get(task_of(model).name)
    if kind is None:
        raise UserError(
            f"a batch of {model.spec.recipe} is a record of its task (manyformer.nn.batches), and data gave a "
            f"{_describe(raw)}"
        )
    if isinstance(raw, list | tuple) and len(raw) == 1:
        raw = raw[0]
    is_causal = kind is CausalLMBatch
    if isinstance(raw, Tensor) and is_causal:
        rows = raw.long()
        return CausalLMBatch(rows[:, :-1], rows[:, 1:])
    if isinstance(raw, list | tuple) and 2 <= len(raw) <= len(kind._fields):
        record: Batch = kind(*raw)
        return record
    if isinstance(raw, Mapping):
        return _record_of(kind, dict(raw), is_causal=is_causal)
    raise UserError(f"data gave a {_describe(raw)}; {model.spec.recipe} learns from {', '.join(kind._fields[:2])}")


def _record_of(kind: Any, named: dict[str, Any], *, is_causal: bool) -> Batch:
    """The batch of a mapping with the names of its fields, or with those of Hugging Face's tokenizers and models."""
    if "input_ids" in named:
        named["tokens"] = named.pop("input_ids")
    if "attention_mask" in named:
        # 1 is a token and 0 is padding; segment 0 is a row's only document
        named["segments"] = named.pop("attention_mask").long() - 1
    if "labels" in named and "labels" not in kind._fields:
        labels = named.pop("labels")
        if is_causal:
            nothing = torch.full_like(labels[:, :1], IGNORE_INDEX)
            labels = torch.cat([labels[:, 1:], nothing], dim=1)
        named["targets"] = labels
    if is_causal and "targets" not in named:
        raise UserError("the batch has no labels and no targets; a tensor of token rows alone needs neither")
    unknown = [name for name in named if name not in kind._fields]
    if unknown:
        raise UserError(
            f"the batch has {unknown[0]}, which this model does not take; it takes {', '.join(kind._fields)}"
        )
    record: Batch = kind(**named)
    return record


def _describe(raw: Any) -> str:
    if isinstance(raw, list | tuple):
        return f"{type(raw).__name__} of {len(raw)}"
    return type(raw).__name__
