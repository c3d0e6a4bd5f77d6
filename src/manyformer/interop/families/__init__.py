"""The families of Hugging Face models that have an equal recipe; the file of one is imported when it is asked for."""

from functools import cache
from importlib import import_module

from manyformer.interop.model_family import ModelFamily

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
    "mamba": ("mamba",),
    "qwen3_next": ("qwen3_next",),
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
