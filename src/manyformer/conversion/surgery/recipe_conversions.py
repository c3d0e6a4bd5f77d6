"""The registry of conversions between recipes, and the conversion that adds a kNN memory to a language model."""

from dataclasses import replace
from functools import partial
from typing import Any

from manyformer.base.errors import UserError
from manyformer.conversion.surgery.conversion import RecipeConversion, RecipeKeywords, TransformedModel
from manyformer.conversion.surgery.head_sharing import COUNTERPART_RECIPES, collaborate
from manyformer.conversion.surgery.weight_transfer import copied_global_projections
from manyformer.models import LanguageModel, Model
from manyformer.models.generative_model import as_language_model
from manyformer.models.with_early_exit import early_exit
from manyformer.recipes.parts.registry import SHARED_QK_DIM, build, get_recipe

ANY_RECIPE = "*"
"""The source of conversions that models of many recipes have."""

CONVERSIONS: dict[tuple[str, str], RecipeConversion] = {}
"""All conversions by the recipes before and after; changing keywords of a recipe needs none."""


def register(conversion: RecipeConversion) -> RecipeConversion:
    """Offer a conversion. Raises UserError if there is one between the same recipes."""
    pair = conversion.source, conversion.target
    if pair in CONVERSIONS:
        raise UserError(f"there is a conversion from {pair[0]} to {pair[1]} already")
    CONVERSIONS[pair] = conversion
    return conversion


MEMORIZING_RECIPE = "memorizing-transformer"

COUNTERPART_KEYWORDS: dict[str, dict[str, Any]] = {
    "transformer-xl": {"position": "xl", "qk_similarity": "product"},
    MEMORIZING_RECIPE: {},
}
"""The recipes whose models can be given a memory, with the keywords that the converted model then needs."""

DEFAULT_GATE = 0.02


def memorize(
    model: Model,
    *,
    memory: int,
    layer: int | None = None,
    neighbours: int | None = None,
    block: int | None = None,
    gate: float = DEFAULT_GATE,
) -> LanguageModel:
    """Convert `model` so that one layer retrieves from a memory of `memory` key-value pairs (Wu et al. 2022).

    The result is a new `memorizing-transformer` with the weights of `model`. The memory's weight is `gate` at first, so
    that the new model starts close to the old one; train it further to use the memory (section 4.4 of the paper;
    20,000 steps there). If `model` has such a memory already, only its size changes, and `layer` and `gate` keep their
    values. Arguments that are None are taken from the model, else from the recipe's defaults. Raises UserError for a
    recipe without a segment memory.
    """
    recipe = model.spec.recipe
    old_keywords = model.spec.keywords
    if recipe not in COUNTERPART_KEYWORDS:
        raise UserError(f"a {recipe} cannot be given a memory; a {' or a '.join(COUNTERPART_KEYWORDS)} can")
    if old_keywords["memory_length"] is None:
        raise UserError("a kNN memory needs a segment memory as well: set memory_length")
    valid_names = get_recipe(MEMORIZING_RECIPE).signature.parameters
    has_memory = old_keywords.get("knn_memory_size") is not None
    keywords = {name: value for name, value in old_keywords.items() if name in valid_names}
    keywords |= COUNTERPART_KEYWORDS[recipe] | {"knn_memory_size": memory}
    keywords |= {name: value for name, value in {"neighbours": neighbours, "block": block}.items() if value is not None}
    # layer and gate are those of the first conversion
    if not has_memory:
        keywords |= {"layer": layer, "gate": gate, "combine": "gate"}
    elif layer not in (None, old_keywords["layer"]):
        raise UserError(f"layer ({layer}) must be {old_keywords['layer']}, the layer that has the model's memory")
    parameter = next(model.parameters())
    memorizing = build(MEMORIZING_RECIPE, **keywords).to(device=parameter.device, dtype=parameter.dtype)
    # not strict: the weights of the gate are new
    load_result = memorizing.load_state_dict(model.state_dict(), strict=False)
    if has_memory:
        new_weights = set()
    else:
        new_weights = {name for name in memorizing.state_dict() if ".combine." in name}
    assert set(load_result.missing_keys) == new_weights
    assert not load_result.unexpected_keys
    memorizing.tokenizer = model.tokenizer
    return as_language_model(memorizing, "have a memory").train(model.training)


LONGFORMER_PAPER = "Beltagy et al. 2020, Longformer: The Long-Document Transformer, arXiv:2004.05150, section 5"

LONGFORMER_FINDING = (
    "masked-token loss of RoBERTa base at 4,096 tokens, in bits per character: 1.846 before, 1.957 right after, 1.705 "
    "after 65,000 updates, 10.299 with random positions (table 5)"
)

KERNEL_FINDINGS: dict[str, tuple[str, str]] = {
    "t2r": (
        "Kasai et al. 2021, Finetuning Pretrained Transformers into RNNs, arXiv:2103.13076",
        "kernels are swapped and the model is then fine-tuned, which costs less training than such a model from random "
        "weights and keeps most of the accuracy in language modelling and translation (abstract)",
    ),
    "hedgehog": (
        "Zhang et al. 2024, The Hedgehog & the Porcupine, arXiv:2402.04347",
        "perplexity of GPT-2 125M on WikiText-103 after transfer and fine-tuning: 16.7; fine-tuned softmax: 15.8",
    ),
    "lolcats": (
        "Zhang et al. 2024, LoLCATs: On Low-Rank Linearizing of Large Language Models, arXiv:2410.10254",
        "MMLU of Llama 3 8B: 66.6 with softmax, 52.8 with windows of 64 and Hedgehog features, 24.2 with these alone; "
        "of Llama 3.1 70B 67.7 after attention transfer, 28.7 without (tables 4 and 7)",
    ),
}
"""The paper and the finding of a softmax model that gets the kernel of this name."""


def _check_repeated_positions(reach: str, source: RecipeKeywords, target: RecipeKeywords) -> list[str]:
    """A warning where a token sees two tokens with the same position."""
    old = source["max_length"]
    new = target["max_length"]
    distance = target[reach]
    # no repetition, or one that no token can see
    if new <= old or 2 * distance <= old:
        return []
    return [
        f"{reach} ({distance}) is above half of the {old} positions that are repeated: a token then sees two tokens "
        f"with the same position; {reach}={old // 2} or less avoids that"
    ]


def _make_collaborative(recipe: str | None, model: Model, requested: RecipeKeywords) -> TransformedModel:
    name = SHARED_QK_DIM if recipe is None else "shared_dim"
    # as many as the model has are exact
    keywords = {name: model.spec.keywords.get("dim"), **requested}
    shared = keywords.pop(name)
    _refuse_others(keywords, name)
    result = collaborate(model, shared=shared, recipe=recipe)
    derivations = {
        f"{name}.": f"heads decomposed, relative error of their products {error:.4f}"
        for name, error in result.errors.items()
    }
    return TransformedModel(result.model, derivations)


def _make_memorizing(model: Model, requested: RecipeKeywords) -> TransformedModel:
    keywords = {
        "knn_memory_size": None,
        "layer": None,
        "neighbours": None,
        "block": None,
        "gate": DEFAULT_GATE,
        **requested,
    }
    if (memory := keywords.pop("knn_memory_size")) is None:
        raise UserError("a memory needs its size: set knn_memory_size, such as 8192")
    chosen = {name: keywords.pop(name) for name in ("layer", "neighbours", "block", "gate")}
    _refuse_others(keywords, "knn_memory_size, layer, neighbours, block and gate")
    return TransformedModel(memorize(model, memory=memory, **chosen))


def _make_early_exit(model: Model, requested: RecipeKeywords) -> TransformedModel:
    return TransformedModel(early_exit(model, **requested))


def _refuse_others(keywords: RecipeKeywords, allowed: str) -> None:
    if keywords:
        raise UserError(f"{next(iter(keywords))} cannot change in this conversion: it has {allowed}")


register(
    RecipeConversion(
        source="bert",
        target="longformer",
        paper=LONGFORMER_PAPER,
        finding=LONGFORMER_FINDING,
        rules=(copied_global_projections,),
        warnings=lambda source, target: _check_repeated_positions("window", source, target),
    )
)


register(
    RecipeConversion(
        source="bert",
        target="bigbird",
        paper="Zaheer et al. 2020, Big Bird, arXiv:2007.14062, section 4",
        finding="masked-token loss of the base model at 4,096 tokens, begun with RoBERTa's weights, in bits per "
        "character: 1.678, Longformer's 1.705, RoBERTa's at 512 tokens 1.846 (table 8)",
        warnings=lambda source, target: _check_repeated_positions("block", source, target),
    )
)

SHARED_HEADS = RecipeConversion(
    source=ANY_RECIPE,
    target=ANY_RECIPE,
    paper="Cordonnier et al. 2020, Multi-Head Attention: Collaborate Instead of Concatenate, arXiv:2006.16362",
    finding="a third of the dimensions of queries and keys can be shared with a small loss after fine-tuning "
    "(section 4)",
    transform=partial(_make_collaborative, None),
)
"""What gives a model of any recipe the keyword `shared_qk_dim`."""


for _source, _target in COUNTERPART_RECIPES.items():
    register(replace(SHARED_HEADS, source=_source, target=_target, transform=partial(_make_collaborative, _target)))


for _source in COUNTERPART_KEYWORDS:
    register(
        RecipeConversion(
            source=_source,
            target=MEMORIZING_RECIPE,
            paper="Wu et al. 2022, Memorizing Transformers, arXiv:2203.08913, section 4.4",
            finding="20,000 steps with a memory, 4 % of the pretraining, recover most of what it gains from the start",
            transform=_make_memorizing,
        )
    )


for _target in ("early-exit-lm", "early-exit-seq2seq"):
    register(
        RecipeConversion(
            source=ANY_RECIPE,
            target=_target,
            paper="Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061",
            finding="up to three times fewer layers for each token of T5 at equal quality (section 6)",
            transform=_make_early_exit,
        )
    )
