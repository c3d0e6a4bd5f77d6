"""Early exit added to any language model or encoder-decoder."""

from typing import Any, TypeVar, Unpack

from manyformer.errors import UserError
from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.models.with_early_exit import DATA_KEYWORDS, EarlyExitConfig, with_early_exit
from manyformer.recipes.exit_keywords import BaseKeywordsKeyword, BaseRecipeKeyword, EarlyExitOptions
from manyformer.recipes.registry import build, get_recipe, recipe
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.tasks.translation import TRANSLATION

ROUNDING_CHANGES_EXITS = dict.fromkeys(
    ("float16", "bfloat16"),
    "rounding moves confidences near the threshold to its other side, so tokens exit at other layers",
)
PAPER = (
    "Elbayad et al. 2020, Depth-Adaptive Transformer, arXiv:1910.10073; "
    "Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061"
)
GenerativeT = TypeVar("GenerativeT", LanguageModel, EncoderDecoder)
TINY = {"dim": 16, "depth": 3, "heads": 2, "ff_dim": 24, "dropout": 0.0}


@recipe(
    "Early exit (language model)",
    paper=PAPER,
    summary="Any language model; each token exits after the first layer that is confident.",
    task=LANGUAGE_MODELLING,
    cost="that of the layers that a token is computed in, and keys and values of all",
    reasons=ROUNDING_CHANGES_EXITS,
    tiny_keywords={"base_keywords": TINY, "threshold": 0.02},
)
def early_exit_lm(
    vocab: int = 256,
    max_length: int | None = None,
    base_recipe: BaseRecipeKeyword = "transformer-lm",
    base_keywords: BaseKeywordsKeyword = None,
    **options: Unpack[EarlyExitOptions],
) -> LanguageModel:
    """The language model of the recipe `base_recipe` with keywords `base_keywords`, with early exit.

    `manyformer.early_exit` describes the other keywords; `mf.early_exit(model, ...)` does the same to an existing
    model."""
    config = EarlyExitConfig(**options)
    data_keywords = {"vocab": vocab, "max_length": max_length}
    expected = "a language model; early-exit-seq2seq is for encoder-decoders"
    return _wrap_base(LanguageModel, base_recipe, base_keywords, data_keywords, config, expected)


@recipe(
    "Early exit (encoder-decoder)",
    paper=PAPER,
    summary="Any encoder-decoder; each token exits the decoder after the first layer that is confident.",
    task=TRANSLATION,
    cost="that of the layers that a token is computed in, and keys and values of all",
    reasons=ROUNDING_CHANGES_EXITS,
    tiny_keywords={"base_keywords": TINY, "threshold": 0.02},
)
def early_exit_seq2seq(
    vocab: int = 37000,
    source_vocab: int | None = None,
    max_length: int | None = None,
    base_recipe: BaseRecipeKeyword = "transformer",
    base_keywords: BaseKeywordsKeyword = None,
    **options: Unpack[EarlyExitOptions],
) -> EncoderDecoder:
    """The encoder-decoder of the recipe `base_recipe` with keywords `base_keywords`, with early exit.

    `manyformer.early_exit` describes the other keywords; `mf.early_exit(model, ...)` does the same to an existing
    model."""
    config = EarlyExitConfig(**options)
    data_keywords = {"vocab": vocab, "source_vocab": source_vocab, "max_length": max_length}
    expected = "an encoder-decoder; early-exit-lm is for language models"
    return _wrap_base(EncoderDecoder, base_recipe, base_keywords, data_keywords, config, expected)


def _wrap_base(
    model_class: type[GenerativeT],
    base_recipe: str,
    base_keywords: dict[str, Any] | None,
    data_keywords: dict[str, Any],
    config: EarlyExitConfig,
    expected: str,
) -> GenerativeT:
    """The model of the recipe `base_recipe` with early exit; data keywords that it does not have are dropped."""
    keywords = dict(base_keywords or {})
    parameters = get_recipe(base_recipe).signature.parameters
    if misplaced := [name for name in DATA_KEYWORDS if name in keywords]:
        raise UserError(
            f"base_keywords.{misplaced[0]} ({keywords[misplaced[0]]}) must be given as the keyword {misplaced[0]}"
        )
    model = build(
        base_recipe,
        **keywords,
        **{name: value for name, value in data_keywords.items() if name in parameters and value},
    )
    wrapped = with_early_exit(model, config)
    if not isinstance(wrapped, model_class):
        raise UserError(f"{base_recipe} is not {expected}")
    return wrapped
