"""The registry of recipes: functions whose signatures are their command lines, each with a card of its contracts."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypedDict, TypeVar

import torch
from annotated_types import Ge, Lt

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.json_records import DamagedFile
from manyformer.base.keyword_checks import Default, SharedKeywords, check_names, checked_keywords
from manyformer.base.plugins import RECIPE_GROUP, entry_points, import_entry_point, import_entry_points, is_external
from manyformer.base.system import end_start
from manyformer.config.published_sizes import ALIASES, PUBLISHED_SIZES, PublishedSize, nearest_recipe, published_size
from manyformer.models.model import Model
from manyformer.models.model_files import CONFIG_FILE, ModelSpec, read_spec
from manyformer.models.tasks import Task
from manyformer.nn.attention.attention import set_attention_dropout
from manyformer.nn.attention.collaborative_attention import share_query_key_dims
from manyformer.nn.attention.head_gates import parse_heads, remove_heads
from manyformer.nn.runtime.devices import SMALLER_MODEL, bounded_model, check_model_fits, report_out_of_memory
from manyformer.nn.runtime.module_places import separate_places
from manyformer.nn.runtime.shapes_alone import on_meta_device
from manyformer.recipes.parts.cards import (
    FAMILIES,
    OWN_PREFIX,
    OWN_RECIPES,
    REGISTERED,
    Recipe,
    RecipeCard,
    import_own_recipes,
    recipe_modules,
    signature_with_choices,
    with_task_reasons,
)
from manyformer.recipes.parts.keywords import PositiveSize, keyword_signature, record_parameters

if TYPE_CHECKING:
    from manyformer.models.tasks import Task

P = ParamSpec("P")
M = TypeVar("M", bound=Model)


if TYPE_CHECKING:
    RECIPES: dict[str, Recipe]
    """The recipes of this package and of modules imported so far; `all_recipes` also has those of installed ones."""
else:

    def __getattr__(name: str) -> Any:
        if name != "RECIPES":
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        import_own_recipes()
        return REGISTERED


def recipe(
    title: str,
    *,
    paper: str,
    summary: str,
    task: "Task",
    cost: str,
    family: str = "other",
    constant_state: bool = False,
    backends: tuple[str, ...] = ("cpu", "cuda", "mps"),
    reasons: dict[str, str] | None = None,
    tiny_keywords: dict[str, Any] | None = None,
) -> Callable[[Callable[P, M]], Callable[P, M]]:
    """Register a function as a recipe, under its name with dashes; the models it builds get a `ModelSpec`."""
    if family not in FAMILIES:
        raise UserError(f"there is no family '{family}' of recipes; {suggest_names(family, FAMILIES)}")

    def register(function: Callable[P, M]) -> Callable[P, M]:
        name = function.__name__.replace("_", "-")
        card = RecipeCard(
            name=name,
            title=title,
            paper=paper,
            summary=summary,
            task=task,
            cost=cost,
            family=family,
            constant_state=constant_state,
            backends=backends,
            reasons=with_task_reasons(task.reasons, reasons or {}),
            tiny_keywords=tiny_keywords or {},
        )
        # a recipe of this package has its name before its module is imported
        module = REGISTERED[name].module if name in REGISTERED else recipe_modules().get(name)
        # the same module may come twice, as where a notebook's cell is run again
        if module not in (None, function.__module__):
            raise UserError(f"there are two recipes '{name}', in {module} and in {function.__module__}; rename one")
        build_with_spec = _with_spec(function, name, task)
        REGISTERED[name] = Recipe(card, build_with_spec)
        return build_with_spec

    return register


def _with_spec(function: Callable[P, M], name: str, task: "Task") -> Callable[P, M]:
    """`function` with its keywords checked and shared ones expanded; the models it builds get a `ModelSpec`."""
    own_signature = keyword_signature(function)
    added = _shared_keywords(own_signature, task)
    # the command line, the documentation and run files read this signature, not the function's own
    signature = own_signature.replace(parameters=[*own_signature.parameters.values(), *chain(*added.values())])

    @wraps(function)
    def build_with_spec(*args: P.args, **kwargs: P.kwargs) -> M:
        end_start()
        check_names(name, kwargs, signature.parameters)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        keywords = checked_keywords(name, bound.arguments, signature_with_choices(signature))
        bound.arguments.update(keywords)
        # shared keywords are not those of the function: they change the model that it has built
        changes = [
            group.read({parameter.name: bound.arguments.pop(parameter.name) for parameter in parameters})
            for group, parameters in added.items()
        ]

        def build_unchecked() -> Any:
            model: Any = function(*bound.args, **bound.kwargs)
            separate_places(model)
            for change in changes:
                model = change(model)
            return model

        cpu = torch.device("cpu")
        with report_out_of_memory(f"building {name}", SMALLER_MODEL):
            # built on the meta device first, so that a model beyond the memory is refused before it is begun
            check_model_fits(build_unchecked, name, keywords, copies=1, device=cpu)
            model: M = build_unchecked()
        model.spec = ModelSpec(name, keywords, function.__module__)
        return model

    build_with_spec.__signature__ = signature  # type: ignore[attr-defined]
    return build_with_spec


REMOVED_HEADS = "removed_heads"
SHARED_QK_DIM = "shared_qk_dim"


class AttentionOptions(TypedDict, total=False):
    """What changes all attention of a model."""

    attention_dropout: Annotated[
        float, Ge(0), Lt(1), "probability that a weight of softmax attention is dropped in training", Default(0.0)
    ]
    removed_heads: Annotated[
        str | None,
        "attention heads to build without, as manyformer prune writes them: layer:number,number layer:number",
        Default(None),
    ]
    shared_qk_dim: Annotated[
        PositiveSize | None,
        "number of query and key dimensions that all heads of a layer share (collaborative attention); null means that "
        "each head has its own",
        Default(None),
    ]


def _read_attention_options(options: dict[str, Any]) -> Callable[[Any], Any]:
    removed = {}
    if text := options.get(REMOVED_HEADS):
        removed = parse_heads(text)
    shared_qk_dim = options.get(SHARED_QK_DIM)
    dropout = options.get("attention_dropout", 0.0)

    def change(model: Any) -> Any:
        if shared_qk_dim is not None:
            share_query_key_dims(model, shared_qk_dim)
        if removed:
            remove_heads(model, removed)
        if dropout:
            set_attention_dropout(model, dropout)
        return model

    return change


ATTENTION_KEYWORDS = SharedKeywords(AttentionOptions, _read_attention_options)
"""What every recipe that chooses a number of heads has besides its own keywords."""


def _shared_keywords(signature: inspect.Signature, task: "Task") -> dict[SharedKeywords, list[inspect.Parameter]]:
    """The groups of keywords that a recipe shares with others of its kind, without those that it has itself."""
    groups: list[SharedKeywords] = []
    if task.recipe_keywords is not None:
        groups.append(task.recipe_keywords)
    if {"heads", "base_keywords"} & signature.parameters.keys():
        groups.append(ATTENTION_KEYWORDS)
    return {
        group: [added for added in record_parameters(group.record) if added.name not in signature.parameters]
        for group in groups
    }


def registered_recipe(name: str) -> Recipe | None:
    """The recipe of that name in this package, of which only its file is imported, or in a module imported so far."""
    if name not in REGISTERED and name in recipe_modules():
        importlib.import_module(recipe_modules()[name])
    return REGISTERED.get(name)


def get_recipe(name: str) -> Recipe:
    """The recipe of that name, imported if an installed package offers it. Raises UserError with the nearest names."""
    recipe = registered_recipe(name)
    if recipe is None and import_entry_point(RECIPE_GROUP, name) and name not in REGISTERED:
        module = entry_points(RECIPE_GROUP)[name].module
        raise UserError(f"the module {module} of an installed package offers the recipe '{name}', but defines none")
    if name in REGISTERED:
        return REGISTERED[name]
    if (size := published_size(name)) is not None:
        return _with_published_size(name, size)
    if name in OWN_RECIPES:
        return OWN_RECIPES[name]
    if name.startswith(OWN_PREFIX):
        raise UserError(
            f"{name} is a module of the user's own, which only the program that trains it can build: give it to "
            "mf.train, mf.evaluate or mf.compare; safetensors.torch.load_model(module, FILE) reads its weights"
        )
    if ".py:" in name:
        # registers what it finds, so that it imports this module
        from manyformer.recipes.parts.own_modules import recipe_in_imported_file

        return recipe_in_imported_file(name)
    if (nearest := nearest_recipe(name)) is not None:
        raise UserError(f"there is no recipe '{name}'; {nearest}")
    raise UserError(f"there is no recipe '{name}'; {suggest_names(name, recipe_names())}")


def _with_published_size(name: str, size: PublishedSize) -> Recipe:
    """The recipe of a published size: its keywords have other defaults, and are checked and saved as ever."""
    base = get_recipe(size.recipe)
    defaults = size.keywords

    @wraps(base.build)
    def build_with_size(**keywords: Any) -> Model:
        return base.build(**{**defaults, **keywords})

    parameters = inspect.signature(base.build).parameters.values()
    changed = [parameter.replace(default=defaults.get(parameter.name, parameter.default)) for parameter in parameters]
    build_with_size.__signature__ = inspect.Signature(changed)  # type: ignore[attr-defined]
    return Recipe(replace(base.card, name=name, title=f"{size.title} ({size.recipe})"), build_with_size)


def recipe_names() -> set[str]:
    """The names of all recipes, with those of published sizes and of installed packages, which are not imported."""
    return {*recipe_modules(), *REGISTERED, *PUBLISHED_SIZES, *ALIASES, *entry_points(RECIPE_GROUP)}


def modules_to_import(name: str) -> tuple[str, ...]:
    """The module that another process must import to know a recipe; none if it is ours or an installed package's."""
    module = get_recipe(name).module
    is_offered = name in entry_points(RECIPE_GROUP) or module == "__main__"
    if is_external(module) and not is_offered:
        return (module,)
    return ()


def all_recipes() -> dict[str, Recipe]:
    """All recipes by name, those of installed packages too, which are imported."""
    import_own_recipes()
    import_entry_points(RECIPE_GROUP)
    return dict(sorted(REGISTERED.items()))


def read_saved_recipe(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and keywords of the model saved in a folder. Raises UserError if no imported module defines it.

    A saved model is data: what it names is never imported, but for the recipe that an installed package offers."""
    return recipe_of_spec(read_spec(folder), folder)


def recipe_of_spec(spec: ModelSpec, folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and keywords of the spec in a folder; see `read_saved_recipe`. Raises DamagedFile for wrong ones."""
    name = spec.recipe
    module = spec.module
    # `get_recipe` knows these, or says what they are
    is_named = name in recipe_names() or ":" in name
    if module and is_external(module) and not is_named:
        raise UserError(
            f"{folder} needs the recipe '{name}' of the module {module}, which no installed package offers; import it "
            f"with --import {module}, or mf.load(folder, imports=['{module}']) in Python"
        )
    file = folder / CONFIG_FILE
    recipe = recipe_in_file(name, file)
    # a head of an installed package is a choice of the keyword once the package is imported
    recipe.card.task.built_with(spec.keywords)
    try:
        return recipe, checked_keywords(name, spec.keywords, recipe.signature)
    except UserError as error:
        raise DamagedFile(f"{file} is damaged: {error}") from None


def recipe_in_file(name: str, file: Path) -> Recipe:
    """`get_recipe`, with an error that names the file in which the name stands."""
    try:
        return get_recipe(name)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def task_of(model: Model) -> "Task[Any]":
    """The task of the model's head or recipe, else that of its class. Raises UserError for a class without a task."""
    spec: ModelSpec | None = getattr(model, "spec", None)
    if spec is not None and spec.recipe in OWN_RECIPES:
        return OWN_RECIPES[spec.recipe].card.task
    recipe = None if spec is None else registered_recipe(spec.recipe)
    if spec is None or recipe is None:
        # cards bring their tasks with them: only a class without a recipe needs the registry of all tasks
        from manyformer.models.tasks import task_of_class

        return task_of_class(model)
    return recipe.card.task.built_with(spec.keywords)


def card_of(spec: ModelSpec) -> RecipeCard | None:
    """The card of a model's recipe; for a recipe with a base recipe or body, only the contracts that both promise.

    None if the recipe is not registered."""
    recipe = registered_recipe(spec.recipe)
    if recipe is None:
        return None
    # models inside models keep only what both promise
    base_name = spec.keywords.get("base_recipe") or spec.keywords.get("body") or ""
    base = registered_recipe(base_name)
    if base is None:
        return recipe.card
    return replace(recipe.card, reasons={**base.card.reasons, **recipe.card.reasons})


def build(name: str, **keywords: Any) -> Model:
    """A new model: `build("transformer-lm", vocab=256, depth=4)`. Raises UserError for unknown names or keywords."""
    return get_recipe(name).build(**keywords)


def build_on_meta(recipe: str, keywords: dict[str, Any]) -> Model:
    """The model on the `meta` device, without storage for its weights: fast for any size."""
    with bounded_model(recipe), on_meta_device():
        return build(recipe, **keywords)
