"""`mf.convert`: a trained model as one of another recipe, or of the same recipe with other keywords."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.keyword_checks import check_names
from manyformer.base.system import temporary_folder
from manyformer.config import TextData, TransferConfig
from manyformer.conversion.surgery.attention_transfer import TransferProgressFn, attention_pairs, transfer_attention
from manyformer.conversion.surgery.conversion import (
    ConversionOptions,
    ConversionReport,
    ConvertedModel,
    KeyHeadPooling,
    LayerGrowth,
    LayerSharing,
    LayerTransfer,
    ModelPair,
    RecipeConversion,
    RecipeKeywords,
    TensorOrigin,
    TransformedModel,
    tensors_by_place,
)
from manyformer.conversion.surgery.recipe_conversions import ANY_RECIPE, CONVERSIONS, KERNEL_FINDINGS, SHARED_HEADS
from manyformer.conversion.surgery.weight_transfer import describe_changes, transfer_weights
from manyformer.data import Tokenizer, TokenizerPair, open_file
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.models.model import Model, eval_mode
from manyformer.nn.batches import Batch
from manyformer.recipes.parts.registry import SHARED_QK_DIM, build, get_recipe, task_of

COMPARED_TOKENS = 32
"""The length of the random texts on which the logits of both models are compared."""

ROW_TOKENS = 256
"""The length of rows, for models that allow it."""

BATCH_TOKENS = 2048
"""The tokens of a batch."""


def convert(
    model: Model,
    to: str | None = None,
    *,
    growth: LayerGrowth = "silent",
    pooling: KeyHeadPooling = "mean",
    sharing: LayerSharing = "stepwise",
    transfer: TransferConfig | None = None,
    data: str | Path | None = None,
    on_progress: TransferProgressFn = lambda step, loss: None,
    **keywords: Any,
) -> ConvertedModel:
    """Convert a trained model to the recipe `to`, or give it other `keywords` of its own recipe.

    All keywords that both recipes have keep their values unless they are given. Weights of equal names and shapes are
    copied; longer tables of learned positions repeat the rows of the shorter one, fewer heads of keys and values are
    those of the model pooled (`pooling`), more layers are copies (`growth`, see `ConversionOptions`), layers that are
    applied several times are made of those in their places (`sharing`), and a kernel of another kind has its own new
    tensors. What no rule explains is refused. `model` is not changed.

    With `transfer` these new tensors learn to imitate the attention that they replace, on the text of the file `data`
    (see `transfer_attention`); `on_progress` receives each step and its loss.

    Raises UserError where nothing would change, for recipes between which there is no conversion, for keywords that the
    target does not have, for tensors that nothing explains, and for a transfer without data or new tensors to learn.
    """
    config = TransferConfig() if transfer is None else transfer
    if (config.steps is None) != (data is None):
        lacks, needs = ("data", "a text to learn from") if data is None else ("transfer", "its number of steps")
        raise UserError(f"attention transfer needs {lacks}: {needs}")
    target = model.spec.recipe if to is None else to
    if target == model.spec.recipe and not keywords:
        raise UserError(f"nothing would change: name another recipe than {target}, or keywords to change")
    conversion = _find_conversion(model, target, keywords)
    if conversion is not None and conversion.transform is not None:
        if config.steps is not None:
            raise UserError(f"attention transfer is for new kernels, and a conversion to {target} makes none")
        transformed = conversion.transform(copy.deepcopy(model), keywords)
        filled = _FilledModel(transformed.model, *_compare_tensors(model, transformed))
    else:
        options = ConversionOptions(growth=growth, pooling=pooling, sharing=sharing)
        pair = ModelPair.of(model, _build_target(model, target, keywords, conversion), options=options)
        filled = _fill_target(pair, conversion)
        if config.steps is not None and data is not None:
            filled = filled._replace(transfers=_transfer(pair, model, config, data, on_progress))
    filled.model.tokenizer = model.tokenizer
    filled.model.train(model.training)
    return ConvertedModel(filled.model, _report(model, filled, conversion, swapped=keywords.get("kernel")))


class _FilledModel(NamedTuple):
    """A converted model, the origins of its tensors, the tensors left behind, and the losses of attention transfer."""

    model: Model
    origins: list[TensorOrigin]
    left_behind: dict[str, str]
    transfers: Sequence[LayerTransfer] = ()


def _fill_target(pair: ModelPair, conversion: RecipeConversion | None) -> _FilledModel:
    """The new model of a pair with the tensors that follow from the trained ones."""
    transfer = transfer_weights(pair, conversion)
    new_weights = tensors_by_place(pair.target)
    for name, value in transfer.values.items():
        new_weights[name].copy_(value)
    return _FilledModel(pair.target, transfer.origins, transfer.left_behind)


def _transfer(
    pair: ModelPair, model: Model, config: TransferConfig, data: str | Path, on_progress: TransferProgressFn
) -> list[LayerTransfer]:
    """Let the new kernels imitate the attention that they replace, on the text in a file."""
    attention_pairs(pair, config)  # what cannot be is refused before the text is read
    with transfer_batches(model, data) as batches:
        return transfer_attention(pair, batches, config, on_progress)


def _report(
    model: Model, filled: _FilledModel, conversion: RecipeConversion | None, swapped: str | None
) -> ConversionReport:
    """What became of a model; `swapped` is the kernel that was requested."""
    spec = model.spec
    new_spec = filled.model.spec
    warnings = list[str]()
    paper, finding = KERNEL_FINDINGS.get(swapped or "", ("", ""))
    if conversion is not None:
        paper = conversion.paper
        finding = conversion.finding
        warnings = conversion.warnings(spec.keywords, new_spec.keywords)
    return ConversionReport(
        source=spec.recipe,
        target=new_spec.recipe,
        keywords=new_spec.keywords,
        origins=filled.origins,
        left_behind=filled.left_behind,
        changes=describe_changes(model, filled.model),
        warnings=warnings,
        parameters=(_count(model), _count(filled.model)),
        difference=logit_difference(model, filled.model),
        paper=paper,
        finding=finding,
        transfers=filled.transfers,
    )


def _find_conversion(model: Model, target: str, keywords: RecipeKeywords) -> RecipeConversion | None:
    """The conversion to a recipe, or to shared heads of the same; None where keywords alone change."""
    if target != model.spec.recipe:
        return conversion_between(model.spec.recipe, target)
    if keywords.get(SHARED_QK_DIM) and not model.spec.keywords.get(SHARED_QK_DIM):
        return SHARED_HEADS
    return None


def conversion_between(source: str, target: str) -> RecipeConversion:
    """The conversion from one recipe to another. Raises UserError, with those that exist, if there is none."""
    get_recipe(target)
    for pair in ((source, target), (ANY_RECIPE, target)):
        if pair in CONVERSIONS:
            return CONVERSIONS[pair]
    targets = sorted({target for start, target in CONVERSIONS if start in (source, ANY_RECIPE)})
    sources = sorted({start for start, end in CONVERSIONS if end == target})
    others = ""
    if sources:
        others = f"; {target} is made of {', '.join(sources)}"
    raise UserError(f"no conversion makes a {target} of a {source}; {suggest_names(target, targets)}{others}")


@torch.no_grad()
def logit_difference(model: Model, new_model: Model) -> float | None:
    """The largest difference of logits on two random rows; None for models that do not read the same inputs."""
    task = task_of(model)
    if task_of(new_model) is not task:
        return None
    # such as images, whose size decides the length
    fixed_length = task.fixed_length(model)
    new_fixed_length = task.fixed_length(new_model)
    if fixed_length != new_fixed_length:
        return None
    limits = [limit for each in (model, new_model) if (limit := each.max_length) is not None]
    length = fixed_length or min([COMPARED_TOKENS, *limits])
    # a generator of its own: a conversion does not change what the program draws later
    tokens = torch.randint(task.token_ids(model), (2, length), generator=torch.Generator().manual_seed(0))
    outputs = []
    for each in (model, new_model):
        with eval_mode(each):
            outputs.append(task.call(each, task.example(each, tokens.to(each.device))).logits.float())
    if outputs[0].shape == outputs[1].shape:
        return float((outputs[0] - outputs[1]).abs().max())
    return None


def _build_target(model: Model, target: str, requested: RecipeKeywords, conversion: RecipeConversion | None) -> Model:
    """A new model of the target recipe, on the device and of the dtype of `model`."""
    recipe = get_recipe(target)
    saved = model.spec.keywords
    valid_names = recipe.signature.parameters
    check_names(target, requested, valid_names)
    chosen = requested | ({} if conversion is None else conversion.keywords(saved, requested))
    defaults = get_recipe(model.spec.recipe).signature.parameters
    for name, value in saved.items():
        if name not in valid_names and value != defaults[name].default:
            raise UserError(f"{target} has no keyword {name}, which this model sets to {value}")
    keywords = {name: value for name, value in saved.items() if name in valid_names} | chosen
    parameter = next(model.parameters())
    try:
        new_model = build(target, **keywords)
    except ValueError as error:
        raise UserError(f"{target}: {error}") from None
    return new_model.to(device=parameter.device, dtype=parameter.dtype)


def _compare_tensors(model: Model, transformed: TransformedModel) -> tuple[list[TensorOrigin], dict[str, str]]:
    """The origins of the tensors of a model that a function made, and the tensors that it has no longer."""
    old = model.state_dict()
    new = transformed.model.state_dict()
    origins = list[TensorOrigin]()
    for name, value in new.items():
        how = next((text for prefix, text in transformed.derivations.items() if name.startswith(prefix)), None)
        if name in old and old[name].shape == value.shape and torch.equal(old[name], value):
            origins.append(TensorOrigin(name, "copied"))
        else:
            origins.append(TensorOrigin(name, "new" if how is None else "derived", how or "initial value"))
    return origins, dict.fromkeys(sorted(old.keys() - new.keys()), "replaced by derived tensors")


def _count(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def transfer_batches(model: Model, path: str | Path) -> Iterator[Iterator[Batch]]:
    """The batches of a text file in order, again and again; prepared files are removed at the end.

    Raises UserError for a model without a tokenizer or of a task that reads no text, and for a file that holds none."""
    tokenizer = model.tokenizer
    form = task_of(model).data_forms.get("text")
    if form is None or not isinstance(tokenizer, Tokenizer):
        lacks = "reads no plain text"
        if form is not None:
            lacks = "has no tokenizer"
        raise UserError(f"this {model.spec.recipe} {lacks}, so attention cannot be transferred on the text of {path}")
    data = TextData(length=min(ROW_TOKENS, model.max_length or ROW_TOKENS), packing="concat")
    with temporary_folder() as scratch_dir:
        request = OpenRequest(BATCH_TOKENS, scratch_dir)
        batches = open_file(data, form, TokenizerPair(tokenizer, tokenizer), str(path), request).batches
        assert batches is not None
        if not len(batches):
            raise UserError(f"{path} holds less text than one row of {data.length} tokens")
        # an iterator of the batches would end; this one begins again, in the same order
        yield itertools.chain.from_iterable(itertools.repeat(batches))
