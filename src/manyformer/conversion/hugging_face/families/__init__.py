"""Families of Hugging Face models that have an equal recipe: what a family is, and the registry of all.

Rules for settings and for tensors are each read in both directions. The file of a family is imported when it is asked
for."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face.hf_folder import HFConfig

Keywords = dict[str, Any]


class ConfigRule(NamedTuple):
    """Fields of a config that say the same as some keywords of a recipe, and the functions from each to the other.

    `read` makes the keywords, and raises UserError for settings that the recipe does not have. `write` makes the
    fields, and raises UserError for keywords that no such config has."""

    read: Callable[[HFConfig], Keywords]
    write: Callable[[Mapping[str, Any]], Keywords]


def setting(
    field: str,
    keyword: str,
    read: Callable[[HFConfig], Any],
    write: Callable[[Mapping[str, Any]], Any] | None = None,
) -> ConfigRule:
    """A field and a keyword; without `write`, the field has the value of the keyword."""
    # most fields say the value of the keyword itself, so that one line reads and writes them
    value_of = write or (lambda keywords: keywords[keyword])
    return ConfigRule(lambda config: {keyword: read(config)}, lambda keywords: {field: value_of(keywords)})


def size(field: str, keyword: str, default: int | str | None = None) -> ConfigRule:
    """A whole number of 1 or more; `default` stands for a missing field: a number, or the field that has it."""
    return setting(field, keyword, lambda config: config.size(field, default))


def optional_size(field: str, keyword: str) -> ConfigRule:
    """A whole number of 1 or more, or None."""
    return setting(field, keyword, lambda config: config.optional_size(field))


def number(field: str, keyword: str, default: float) -> ConfigRule:
    """A number of 0 or more; `default` stands for a missing field."""
    return setting(field, keyword, lambda config: config.number(field, default))


def flag(field: str, keyword: str, *, default: bool) -> ConfigRule:
    """True or false."""
    return setting(field, keyword, lambda config: config.flag(field, default=default))


def either(field: str, keyword: str, true: str, false: str) -> ConfigRule:
    """A flag that is true by default, and the choice that it stands for."""
    return setting(
        field,
        keyword,
        lambda config: true if config.flag(field, default=True) else false,
        lambda keywords: keywords[keyword] == true,
    )


def choice(field: str, keyword: str, default: str, names: Mapping[str, str]) -> ConfigRule:
    """One of some names, from those in the config to ours; of several for one of ours, the first is written."""

    def read(config: HFConfig) -> str:
        return names[config.choice(field, default, names)]

    def write(keywords: Mapping[str, Any]) -> str:
        for hf_name, our_name in names.items():
            if our_name == keywords[keyword]:
                return hf_name
        raise UserError(f"{keyword} is {keywords[keyword]}, and {field} can be {', '.join(names)} alone")

    return setting(field, keyword, read, write)


def required(*, missing: Any = ..., **values: Any) -> ConfigRule:
    """Fields that must have the only values which the recipe has; `missing`, else these, stands for missing fields."""

    def read(config: HFConfig) -> Keywords:
        for name, value in values.items():
            # None is a value that a field may have to lack, so "not given" is an ellipsis
            config.require(name, expected=value, default=value if missing is ... else missing)
        return {}

    return ConfigRule(read, lambda keywords: {})


def fixed(*, missing: Any = ..., **values: Any) -> ConfigRule:
    """Fields that must have the only values which the recipe has, and that exports name."""
    return required(missing=missing, **values)._replace(write=lambda keywords: values)


def written(**fields: Any) -> ConfigRule:
    """Fields that exports name, and that say nothing of an import."""
    return ConfigRule(lambda config: {}, lambda keywords: fields)


def copied(field: str, keyword: str) -> ConfigRule:
    """A field that exports fill from a keyword, which imports do not take over."""
    return ConfigRule(lambda config: {}, lambda keywords: {field: keywords[keyword]})


def implied(**keywords: Any) -> ConfigRule:
    """Keywords with the values that the class has in its code."""
    return ConfigRule(lambda config: keywords, lambda keywords: {})


def demanded(owner: str, **values: Any) -> ConfigRule:
    """Keywords that must have these values in exports, because `owner`, such as "a BERT", has no others."""

    def write(keywords: Mapping[str, Any]) -> Keywords:
        for name, value in values.items():
            if keywords[name] != value:
                raise UserError(f"{name} is {keywords[name]}, and {owner} has {value} alone")
        return {}

    return ConfigRule(lambda config: {}, write)


TensorMap = Callable[[Sequence[Tensor]], Sequence[Tensor]]

WEIGHT = ("weight",)
BIAS = ("bias",)
PARAMETERS = (*WEIGHT, *BIAS)
"""The kinds of the parameters of most modules."""


class TensorRule(NamedTuple):
    """Stored tensors that hold the same numbers as some of ours, and the functions from each to the other.

    `hf` names the stored tensors and `ours` those of the model. Both functions are linear, so that gradients may be
    mapped as well."""

    hf: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: TensorMap
    to_hf: TensorMap


def same(hf: str, ours: str) -> TensorRule:
    """Equal tensors."""
    return TensorRule((hf,), (ours,), tuple, tuple)


def transposed(hf: str, ours: str) -> TensorRule:
    """A matrix that is stored as (inputs, outputs)."""
    return TensorRule((hf,), (ours,), _transpose, _transpose)


def reshaped(hf: str, ours: str, hf_shape: Sequence[int], our_shape: Sequence[int]) -> TensorRule:
    """The same numbers in the same order with other axes."""
    return TensorRule((hf,), (ours,), lambda x: [x[0].reshape(*our_shape)], lambda x: [x[0].reshape(*hf_shape)])


def shifted(hf: str, ours: str, offset: float) -> TensorRule:
    """Our tensor is the stored one plus a number."""
    return TensorRule((hf,), (ours,), lambda x: [x[0] + offset], lambda x: [x[0] - offset])


def padded_rows(hf: str, ours: str, rows: int) -> TensorRule:
    """Our tensor is the stored one without so many rows at its start, which are 0 on the way back."""

    def to_hf(x: Sequence[Tensor]) -> Sequence[Tensor]:
        # rows of positions that no text reaches
        return [torch.cat([x[0].new_zeros(rows, *x[0].shape[1:]), x[0]])]

    return TensorRule((hf,), (ours,), lambda x: [x[0][rows:]], to_hf)


def first_row(hf: str, ours: str, rows: int) -> TensorRule:
    """Our vector is the first row of a stored table of so many rows, whose others are 0 on the way back."""

    def to_hf(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat([x[0][None], x[0].new_zeros(rows - 1, x[0].shape[0])])]

    return TensorRule((hf,), (ours,), lambda x: [x[0][0]], to_hf)


def constant(ours: str, value: Tensor) -> TensorRule:
    """A tensor of ours that follows from the keywords and is not stored."""
    return TensorRule((), (ours,), lambda x: [value], lambda x: [])


def unused(hf: str, shape: Sequence[int]) -> TensorRule:
    """A tensor that only the Hugging Face model has: left out of imports, and zeros in exports."""
    return TensorRule((hf,), (), lambda x: [], lambda x: [torch.zeros(*shape)])


def scaled(hf: str, ours: str, factor: float) -> TensorRule:
    """Our tensor is the stored one times a number."""
    return TensorRule((hf,), (ours,), lambda x: [x[0] * factor], lambda x: [x[0] / factor])


def stacked(hf: Sequence[str], ours: str, sizes: Sequence[int]) -> TensorRule:
    """Our tensor has the rows of the stored ones, which have so many each, one after another."""
    return TensorRule(tuple(hf), (ours,), lambda x: [torch.cat(list(x))], lambda x: torch.split(x[0], list(sizes)))


def stacked_experts(hf: Sequence[str], ours: str) -> TensorRule:
    """Our tensor has an axis more, along which the stored ones stand: a matrix of each expert."""
    return TensorRule(tuple(hf), (ours,), lambda x: [torch.stack(list(x))], lambda x: x[0].unbind())


def divided(hf: str, ours: Sequence[str], sizes: Sequence[int], *, is_transposed: bool = False) -> TensorRule:
    """The stored tensor has the rows of ours, which have so many each; a matrix may be stored as (inputs, outputs)."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.split(x[0].T if is_transposed else x[0], list(sizes))

    def to_hf(x: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(x))
        return [joined.T if is_transposed else joined]

    return TensorRule((hf,), tuple(ours), to_ours, to_hf)


def grouped(hf: str, ours: Mapping[str, Sequence[int]], groups: int) -> TensorRule:
    """Our tensors have blocks of so many rows; the stored one has a share of every block for each group in turn."""
    sizes = [rows for blocks in ours.values() for rows in blocks]

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        by_group = x[0].view(groups, -1, *x[0].shape[1:])
        # (groups, rows of all blocks in a group, ...): cut into blocks, then each block joined over the groups
        blocks = iter(torch.split(by_group, [rows // groups for rows in sizes], 1))
        return [torch.cat([next(blocks).flatten(0, 1) for _ in rows]) for rows in ours.values()]

    def to_hf(x: Sequence[Tensor]) -> Sequence[Tensor]:
        blocks = [block for part, rows in zip(x, ours.values(), strict=True) for block in torch.split(part, list(rows))]
        by_group = [block.view(groups, -1, *block.shape[1:]) for block in blocks]
        return [torch.cat(by_group, 1).flatten(0, 1)]

    return TensorRule((hf,), tuple(ours), to_ours, to_hf)


def depthwise(hf: str, ours: str) -> TensorRule:
    """The weights (channels, 1, taps) of a convolution of each channel, which we have as (taps, channels)."""
    return TensorRule((hf,), (ours,), lambda x: [x[0][:, 0].mT], lambda x: [x[0].mT[:, None]])


def interleaved(hf: str, ours: Sequence[str]) -> TensorRule:
    """The stored channels alternate between our two tensors; matrices of experts are stored as (inputs, outputs)."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        # even channels gate, odd ones are gated, as gpt-oss stores both in one matrix
        parts = (x[0][..., 0::2], x[0][..., 1::2])
        return [part.mT if part.ndim == 3 else part for part in parts]

    def to_hf(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack([part.mT if part.ndim == 3 else part for part in x], -1).flatten(-2)]

    return TensorRule((hf,), tuple(ours), to_ours, to_hf)


def each_parameter(hf: str, ours: str, kinds: Iterable[str] = PARAMETERS) -> list[TensorRule]:
    """Equal parameters of two modules."""
    return [same(f"{hf}.{kind}", f"{ours}.{kind}") for kind in kinds]


def attention_projections(
    hf: Sequence[str], ours: str, kv_rows: Sequence[int], kinds: Iterable[str] = PARAMETERS
) -> Iterator[TensorRule]:
    """The projections of queries, keys, values and outputs, of which we have keys and values in one."""
    query, key, value, output = hf
    for kind in kinds:
        yield same(f"{query}.{kind}", f"{ours}.q_proj.{kind}")
        yield stacked([f"{key}.{kind}", f"{value}.{kind}"], f"{ours}.kv_proj.{kind}", kv_rows)
        yield same(f"{output}.{kind}", f"{ours}.out_proj.{kind}")


def each_module(
    hf: str, ours: str, names: Mapping[str, str], kinds: Iterable[str] = PARAMETERS
) -> Iterator[TensorRule]:
    """Equal parameters of several modules, from the names below `hf` to those below `ours`."""
    for hf_name, our_name in names.items():
        yield from each_parameter(f"{hf}.{hf_name}", f"{ours}.{our_name}", kinds)


def _transpose(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors[0].mT]


PAD_ID = "pad_id"
"""The entry, beside the keywords, of the id of padding: some families number positions from it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """Models of `transformers` that equal a recipe.

    `config_rules` are those of all settings, and `tensor_rules` makes those of all tensors of a model with these
    keywords and `PAD_ID`. Files of the model without its head lack `prefix`. Tensors whose names match a key of
    `left_out` are not needed, for the reason that is its value; `old_names` replaces parts of names that match a key,
    unless there is a tensor of the new name. `other_files` are the JSON files that stand beside the config. Where
    `head_is_optional`, a model without a head gets a new one.
    """

    title: str
    model_types: tuple[str, ...]
    recipe: str
    prefix: str
    config_rules: Sequence[ConfigRule]
    tensor_rules: Callable[[Mapping[str, Any]], Iterable[TensorRule]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    old_names: Mapping[str, str] = field(default_factory=dict)
    head_is_optional: bool = False
    other_files: Callable[[Mapping[str, Any]], Mapping[str, Keywords]] = lambda keywords: {}

    def read_keywords(self, config: HFConfig) -> Keywords:
        """The keywords of a model with this config. Raises UserError for settings that the recipe does not have."""
        keywords: Keywords = {}
        for rule in self.config_rules:
            # later rules win: one may take back what an earlier one has read
            keywords |= rule.read(config)
        return keywords

    def write_config(self, keywords: Mapping[str, Any]) -> Keywords:
        """The config of the equal model, from the keywords and `PAD_ID`. Raises UserError if there is none."""
        fields: Keywords = {}
        for rule in self.config_rules:
            fields |= rule.write(keywords)
        return fields

    def reason_to_leave_out(self, name: str) -> str | None:
        """Why the model does not need a tensor; None if nothing is known of it."""
        return next((reason for pattern, reason in self.left_out.items() if re.fullmatch(pattern, name)), None)

    def complete_names(self, names: Collection[str]) -> dict[str, str]:
        """From the names that the rules have to those of the tensors in files."""
        is_bare = not any(name.startswith(self.prefix) for name in names)
        complete = {f"{self.prefix}{name}" if is_bare else name: name for name in names}
        for old_name in list(complete):
            new_name = old_name
            for pattern, replacement in self.old_names.items():
                new_name = re.sub(pattern, replacement, new_name)
            # a file may have both names, of which the old one is then a copy that `left_out` explains
            if new_name not in complete:
                complete[new_name] = complete.pop(old_name)
        return complete


_FILES = {
    "gpt2": ("gpt2", "decision_transformer"),
    "llama": (
        *("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "phi3"),
        "diffllama",
    ),
    "bert": ("bert", "roberta", "xlm-roberta", "camembert", "distilbert"),
    "long_encoders": ("longformer", "big_bird"),
    "xlnet": ("xlnet",),
    "vit": ("vit", "deit"),
    "encoder_decoders": ("t5", "mt5", "bart", "mbart", "marian", "pegasus"),
    "reformer": ("reformer",),
    "expert_decoders": ("mixtral", "deepseek_v3", "deepseek_v32", "gpt_oss"),
    "recurrent_decoders": ("mamba", "qwen3_next"),
    "perceiver_family": ("perceiver",),
}
"""The files of this package, each with the `model_type`s of its `FAMILIES`."""

_registered: dict[str, ModelFamily] = {}
"""The families of plug-ins by `model_type`."""


def register_family(family: ModelFamily) -> None:
    """Let models of a family from outside this package be read, and written after those of the package.

    Raises ValueError for a `model_type` that the package has a family of."""
    for model_type in family.model_types:
        if any(model_type in types for types in _FILES.values()):
            raise ValueError(f"models of type {model_type!r} have a family already")
        _registered[model_type] = family


def model_types() -> list[str]:
    """Every `model_type` that some family has."""
    return [*(model_type for types in _FILES.values() for model_type in types), *_registered]


def family_of_type(model_type: str) -> ModelFamily:
    """The family of a `model_type`. Raises KeyError if there is none."""
    for file, types in _FILES.items():
        if model_type in types:
            return next(family for family in _families_in(file) if model_type in family.model_types)
    return _registered[model_type]


def all_families() -> list[ModelFamily]:
    """Every family, those of a recipe in the order in which exports try them."""
    own = [family for file in _FILES for family in _families_in(file)]
    return [*own, *dict.fromkeys(_registered.values())]


@cache
def _families_in(file: str) -> tuple[ModelFamily, ...]:
    families: tuple[ModelFamily, ...] = import_module(f"{__name__}.{file}").FAMILIES
    return families
