"""What a recipe is: a function whose signature is the command line, and a card that says what it promises."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from manyformer.errors import UserError, nearest
from manyformer.models import Model, ModelSpec

Task = Literal["language-model", "translation", "masked", "classification", "tagging", "image-classification"]

P = ParamSpec("P")
M = TypeVar("M", bound=Model)


@dataclass(frozen=True, kw_only=True)
class RecipeCard:
    """What a recipe is and what it promises; the contracts hold it to that, and the docs are made from it.

    `causal`: no output depends on a later token. `incremental_decoding`: it goes on from a state, step by step as in
    one pass. `cross_attention`: it attends to a second sequence. `padding_invariant`: padding and packing leave results
    unchanged. `reasons` gives the reason for every promise that is not made; a contract of `manyformer.check` that
    fails for a good reason is excused by its own name. `tiny_keywords` are keywords, beyond the common ones, that build
    it tiny for the contracts."""

    name: str
    title: str
    paper: str
    summary: str
    task: Task
    causal: bool
    incremental_decoding: bool
    cross_attention: bool
    padding_invariant: bool
    cost: str
    backends: tuple[str, ...] = ("cpu", "cuda")
    reasons: dict[str, str] = field(default_factory=dict)
    tiny_keywords: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for promise in ("causal", "incremental_decoding", "cross_attention", "padding_invariant"):
            if not getattr(self, promise) and promise not in self.reasons:
                raise ValueError(f"the card of {self.name} must say why it does not promise '{promise}'")


@dataclass(frozen=True)
class Recipe:
    """A published model as a function of a few keywords."""

    card: RecipeCard
    build: Callable[..., Model]

    @property
    def signature(self) -> inspect.Signature:
        """The keywords with their types and defaults."""
        return inspect.signature(self.build)


RECIPES: dict[str, Recipe] = {}


def recipe(
    title: str,
    *,
    paper: str,
    summary: str,
    task: Task,
    causal: bool = False,
    incremental_decoding: bool = False,
    cross_attention: bool = False,
    padding_invariant: bool = True,
    cost: str,
    backends: tuple[str, ...] = ("cpu", "cuda"),
    reasons: dict[str, str] | None = None,
    tiny_keywords: dict[str, Any] | None = None,
) -> Callable[[Callable[P, M]], Callable[P, M]]:
    """Enter a function into the list of recipes, under its own name with dashes, and let it give its models a spec."""

    def enter(function: Callable[P, M]) -> Callable[P, M]:
        name = function.__name__.replace("_", "-")
        card = RecipeCard(
            name=name,
            title=title,
            paper=paper,
            summary=summary,
            task=task,
            causal=causal,
            incremental_decoding=incremental_decoding,
            cross_attention=cross_attention,
            padding_invariant=padding_invariant,
            cost=cost,
            backends=backends,
            reasons=reasons or {},
            tiny_keywords=tiny_keywords or {},
        )

        def build(*args: P.args, **kwargs: P.kwargs) -> M:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            _check_keywords(function, bound.arguments)
            model = function(*args, **kwargs)
            model.spec = ModelSpec(name, dict(bound.arguments))
            return model

        build.__wrapped__ = function  # type: ignore[attr-defined]
        build.__doc__, build.__name__, build.__module__ = function.__doc__, function.__name__, function.__module__
        RECIPES[name] = Recipe(card, build)
        return build

    return enter


def get_recipe(name: str) -> Recipe:
    """The recipe of that name. Raises UserError with the nearest names."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe '{name}'; {nearest(name, RECIPES)}")
    return RECIPES[name]


def card_of(spec: ModelSpec) -> RecipeCard | None:
    """The card of a model's recipe; of one that wraps another, without what the other does not promise.

    None where the recipe is not known.
    """
    if spec.recipe not in RECIPES:
        return None
    card, inner = RECIPES[spec.recipe].card, RECIPES.get(spec.keywords.get("of", ""))
    if inner is None:
        return card
    kept = {
        name: getattr(card, name) and getattr(inner.card, name)
        for name in ("causal", "incremental_decoding", "padding_invariant")
    }
    return replace(card, **kept, reasons={**inner.card.reasons, **card.reasons})


def build(name: str, **keywords: Any) -> Model:
    """A fresh model: `build("transformer-lm", vocab=256, depth=4)`. Raises UserError for unknown names or keywords."""
    found = get_recipe(name)
    known = found.signature.parameters
    for keyword in keywords:
        if keyword not in known:
            raise UserError(f"{name} has no keyword '{keyword}'; {nearest(keyword, known)}")
    return found.build(**keywords)


def _check_keywords(function: Callable[..., Model], keywords: dict[str, Any]) -> None:
    """Sizes are positive, rates lie in [0, 1) and names are among the choices, whatever the recipe."""
    for name, value in keywords.items():
        annotation = inspect.signature(function).parameters[name].annotation
        if get_origin(annotation) is Literal and value not in get_args(annotation):
            raise UserError(f"{name} ('{value}') must be one of {', '.join(get_args(annotation))}")
        whole = int in (annotation, *get_args(annotation))
        if whole and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"{name} ({value}) must be at least 1")
        if name == "dropout" and not (math.isfinite(value) and 0 <= value < 1):
            raise UserError(f"dropout ({value}) must be at least 0 and below 1")
