"""Load a validated run from a run file, a shipped run or a recipe's name, and overrides.

A run that begins with the weights of a saved model (`init_from`) has its recipe, keywords and tokenizer unless it sets
its own."""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from manyformer.base.errors import UserError, UserErrors, suggest_names
from manyformer.base.files.json_records import special_kind
from manyformer.config.data_sections import GivenData
from manyformer.config.overrides import SettingOverride, parse_overrides, place_overrides
from manyformer.config.run import RunConfig
from manyformer.config.run_file import read_run_file
from manyformer.config.setting_layers import SettingError, SettingLayer, stack
from manyformer.config.setting_names import selected_member, tag_of
from manyformer.config.shipped import is_shipped, shipped_runs
from manyformer.config.training_sections import NoamSchedule
from manyformer.config.validation_errors import validate

RUN_FILE = "run.yaml"
"""The name under which a run's folder keeps its merged run file."""

ImportFn = Callable[[Sequence[str], Path], tuple[str, ...]]
"""Imports the modules of these names, looked for in a folder as well, and returns the names that a run records."""

TOKENIZER_SETTINGS = ("tokenizer_of", "tokenizer", "vocab")

RECORDED_SETTINGS = {"seed", "precision", "trackers", "compile", "device"}
"""Settings that the file of a run in its folder has: it has all of them, and nothing is left to be filled in."""


class TaskProtocol(Protocol):
    """What a run's file needs of the recipe's task: its name, the kinds of data that it learns from, its metrics."""

    @property
    def name(self) -> str: ...
    @property
    def data_forms(self) -> Mapping[str, str]:
        """The kinds of data, the default first, and the form in which each is read."""

    @property
    def metrics(self) -> Mapping[str, bool]:
        """The metrics that may rank checkpoints."""

    def data_kinds(self) -> tuple[str, ...]:
        """All kinds of data that a recipe of the task learns from."""

    def variant(self, data_kind: str) -> "TaskProtocol":
        """The task that such a recipe has on this kind of data."""


class InitialModel(NamedTuple):
    """The model that `init_from` names: its path, its recipe with keywords, and whether it has one tokenizer."""

    path: str
    recipe: str
    keywords: dict[str, Any]
    has_tokenizer: bool


InitialModelFn = Callable[[str, str], InitialModel | None]
"""Describes the model that `init_from` names, or what the run in a folder has recorded of it; None if there is none."""


class RecipeLookup(NamedTuple):
    """How to find a recipe's signature and its task by name, and the names to suggest; unknown names raise ValueError.

    `import_modules` imports what a run names under `import`; with None the run is data and nothing is imported.
    `saved_model` describes the model that `init_from` names, whose recipe, keywords and tokenizer a run then has unless
    it sets its own; with None nothing is read."""

    signature_of: Callable[[str], inspect.Signature]
    task_of: Callable[[str], TaskProtocol] | None = None
    names: Iterable[str] = ()
    import_modules: ImportFn | None = None
    saved_model: InitialModelFn | None = None

    def problem(self, name: object) -> str:
        """The error message for an unknown recipe; empty for a value that is no text, which validation reports."""
        if isinstance(name, str):
            try:
                self.signature_of(name)
            except ValueError as error:
                return str(error)
        return ""

    def keywords(self, name: object) -> set[str]:
        """The keywords of a recipe; none if it is unknown."""
        if isinstance(name, str) and not self.problem(name):
            return set(self.signature_of(name).parameters)
        return set()


class RunTarget(NamedTuple):
    """The name of a run, its layers of settings (the lowest first), and the errors in them."""

    name: str
    layers: list[SettingLayer]
    errors: list[SettingError]


def load_run(
    target: str | Path, overrides: Sequence[str] | Mapping[str, Any] = (), *, recipes: RecipeLookup
) -> RunConfig:
    """Load the run that a target and overrides describe; `out` is set.

    `target` is the path of a YAML run file, a run's folder, the name of a shipped run, or a recipe's name. Overrides
    are `key=value`, `--key value` or `--key=value`; a bare model keyword such as `depth=4` means `model.depth` unless
    another setting has that name too. If an override replaces the recipe of a file, only those model keywords of the
    file are used that the new recipe has as well. Raises UserErrors with every error.
    """
    # the modules may define the recipe that is the target
    import_named(_early_overrides(parse_overrides(overrides)[0]), recipes.import_modules)
    return merge_run(_resolve_target(target, recipes), overrides, recipes)


def merge_run(target: RunTarget, overrides: Sequence[str] | Mapping[str, Any], recipes: RecipeLookup) -> RunConfig:
    """Merge layers of settings and overrides into a run. Raises UserErrors with every error."""
    parsed_overrides, override_errors = parse_overrides(overrides)
    # what decides how all else is read: modules, the recipe, the model that the run begins with
    early = stack([*target.layers, _early_overrides(parsed_overrides)])
    imports = import_named(early, recipes.import_modules)
    saved = find_saved_model(early, f"runs/{target.name}", recipes.saved_model)
    if saved is None or "recipe" in early.data:
        unnamed = {}
    else:
        unnamed = {"recipe": saved.recipe}
    recipe = early.data.get("recipe", unnamed.get("recipe"))
    # an override of the recipe keeps the keywords of the file that fit the new one
    lower = stack(_fit_keywords_to_recipe(target.layers, recipe, recipes))
    signature = None
    task = None
    if problem := recipes.problem(recipe) if recipe else "":
        if imports is None and early.data.get("import"):
            problem += "; the run imports modules that may define it: name them with --import"
        override_errors.append(SettingError(early.location_of(("recipe",)), "recipe", problem))
    elif isinstance(recipe, str) and recipe:
        signature = recipes.signature_of(recipe)
        task = recipes.task_of(recipe) if recipes.task_of else None
    defaults = SettingLayer(unnamed | ({} if task is None else _task_defaults(task)))
    base = stack([defaults, lower])
    # bare names are found among the settings of the members that are selected by now
    upper, placement_errors = place_overrides(parsed_overrides, base, signature)
    merged = with_saved_tokenizer(stack([base, upper]), saved)
    run, section_errors = validate(merged, signature, {error.path for error in target.errors} - {""})
    recipe_errors = _check_recipe_fits(merged, recipe, signature, task)
    if any(error.path == "data.kind" for error in recipe_errors):
        # other errors are about a kind of data that the recipe cannot use
        section_errors = [error for error in section_errors if not error.path.startswith("data.")]
    errors = [*target.errors, *override_errors, *placement_errors, *section_errors, *recipe_errors]
    if any(error.path == "extends" for error in errors):
        # a missing setting may be in the file that could not be read
        errors = [error for error in errors if not error.message.startswith("is missing")]
    if errors or run is None:
        raise UserErrors(dict.fromkeys(str(error) for error in sorted(errors, key=_sort_key)))
    if saved is not None and signature is not None:
        run = with_saved_keywords(run, saved, signature)
    if signature is not None:
        run = with_row_length(run, merged, signature)
    recorded = {} if imports is None else {"imports": imports}
    return run.model_copy(update={**recorded, "out": run.out or f"runs/{target.name}"})


def find_saved_model(settings: SettingLayer, default_out: str, describe: InitialModelFn | None) -> InitialModel | None:
    """The model that the settings name as `init_from`; None without one, for wrong values and for a recorded run."""
    path = settings.data.get("init_from")
    out = settings.data.get("out") or default_out
    is_override = bool(settings.location_of(("init_from",)).argument)
    if describe is None or (settings.data.keys() >= RECORDED_SETTINGS and not is_override):
        return None
    if isinstance(path, str) and path and isinstance(out, str):
        return describe(path, out)
    return None


def with_saved_tokenizer(settings: SettingLayer, saved: InitialModel | None) -> SettingLayer:
    """The settings with the saved model's tokenizer, if the data takes one and no setting names another."""
    member = selected_member("data", settings.data)
    section = settings.data.get("data", {})
    if saved is None or not saved.has_tokenizer or member is None or not isinstance(section, dict):
        return settings
    if "tokenizer_of" in member.model_fields and all(section.get(name) is None for name in TOKENIZER_SETTINGS):
        settings.put(("data", "tokenizer_of"), saved.path, {})
    return settings


def with_saved_keywords(run: RunConfig, saved: InitialModel, signature: inspect.Signature) -> RunConfig:
    """The run with the saved model's keywords where it sets none, if it has the same recipe.

    Keywords that the data decides, and those with the recipe's defaults, are left out.
    """
    if run.recipe != saved.recipe:
        return run
    parameters = signature.parameters
    # the data of this run may be other data, which decides these keywords anew
    decided = run.data.expected_keywords(set(parameters)).keywords.keys()
    taken = {
        name: value
        for name, value in saved.keywords.items()
        if name in parameters
        and value != parameters[name].default
        # a recipe with a length of its own does not take that of the data
        and (name not in decided or (name == "max_length" and parameters[name].default is not None))
    }
    return run.model_copy(update={"model": {**taken, **run.model}})


def with_row_length(run: RunConfig, settings: SettingLayer, signature: inspect.Signature) -> RunConfig:
    """The run with rows of text as short as its model, unless the user has set `data.length`.

    A length in a run file of the package is a default as well: it was chosen for the model of that file."""
    parameter = signature.parameters.get("max_length")
    if parameter is None or not run.data.fills_rows:
        return run
    max_length = run.model.get("max_length", parameter.default)
    location = settings.location_of(("data", "length"))
    is_default = "length" not in settings.data.get("data", {}) or is_shipped(location.file)
    if not is_default or type(max_length) is not int or max_length >= run.data.row_length:
        return run
    return run.model_copy(update={"data": run.data.model_copy(update={"length": max_length})})


def _task_defaults(task: TaskProtocol) -> dict[str, Any]:
    """The kind of data and the metric of a run that sets none."""
    return {"data": {"kind": next(iter(task.data_forms))}, "evaluate": {"metric": next(iter(task.metrics))}}


def import_named(layer: SettingLayer, import_modules: ImportFn | None) -> tuple[str, ...] | None:
    """Import the modules under `import` in a layer; returns the names to record, None without `import_modules`.

    Raises UserErrors."""
    if import_modules is None:
        return None
    setting = layer.data.get("import", ())
    location = layer.location_of(("import",))
    names = [setting] if isinstance(setting, str) else setting
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()  # validation reports it
    try:
        return import_modules(names, Path(location.file).parent)
    except UserError as error:
        raise UserErrors([location.format_error("import", str(error))]) from error


def _early_overrides(overrides: list[SettingOverride]) -> SettingLayer:
    """The layer of the overrides that decide what the others mean, or what is read for a run."""
    layer = SettingLayer()
    for override in overrides:
        if override.key in ("import", "recipe", "init_from", "out"):
            layer.put((override.key,), override.value, {(): override.location})
    return layer


def describe_misfits(recipe: str, task: TaskProtocol, kind: str | None, metric: object) -> dict[str, str]:
    """A message for each setting that the task does not have: the kind of data and the metric, None if unset."""
    messages = {}
    kinds = task.data_kinds()
    # any task may be given batches, which are then its own
    if kind not in (None, GivenData.model_fields["kind"].default, *kinds):
        messages["data.kind"] = f"{recipe} ({task.name}) learns from {' or '.join(kinds)}, not from {kind}"
    # the metrics are those of the task on this kind of data
    task = task.variant(kind or kinds[0])
    if isinstance(metric, str) and metric not in task.metrics:
        message = f"{recipe} ({task.name}) is ranked by {' or '.join(task.metrics)}, not by '{metric}'"
        messages["evaluate.metric"] = message
    return messages


def _check_recipe_fits(
    merged: SettingLayer, recipe: Any, signature: inspect.Signature | None, task: TaskProtocol | None
) -> list[SettingError]:
    """Errors of data and schedule that do not fit the recipe."""
    errors = []
    data = selected_member("data", merged.data)
    evaluate = merged.data.get("evaluate")
    if task is not None:
        kind = None if data is None else tag_of(data, "kind")
        metric = None
        if isinstance(evaluate, dict):
            metric = evaluate.get("metric")
        errors += [
            SettingError(merged.location_of(tuple(key.split("."))), key, message)
            for key, message in describe_misfits(recipe, task, kind, metric).items()
        ]
    has_dim = signature is None or "dim" in signature.parameters
    is_noam = selected_member("schedule", merged.data) is NoamSchedule
    if is_noam and not has_dim and merged.data["schedule"].get("width") is None:
        message = f"is needed: noam's rate follows the model's dim, and {recipe} has no such keyword"
        errors.append(SettingError(merged.location_of(("schedule", "name")), "schedule.width", message))
    return errors


def _fit_keywords_to_recipe(layers: list[SettingLayer], recipe: Any, recipes: RecipeLookup) -> list[SettingLayer]:
    """The layers without model keywords that the recipe they were written for has and `recipe` does not have."""
    fitted = []
    layer_recipe = None
    keywords = recipes.keywords(recipe)
    for layer in layers:
        # a file that names no recipe was written for that of the file below it
        layer_recipe = layer.data.get("recipe", layer_recipe)
        fitted.append(without_keywords(layer, recipes.keywords(layer_recipe) - keywords if keywords else set()))
    return fitted


def model_keywords(layer: SettingLayer) -> set[str]:
    """The names of the model keywords that a layer sets."""
    model = layer.data.get("model")
    if isinstance(model, dict):
        return set(model)
    return set()


def without_keywords(layer: SettingLayer, keywords: Container[str]) -> SettingLayer:
    """The layer without these model keywords."""
    if not model_keywords(layer):
        return layer
    model = {name: value for name, value in layer.data["model"].items() if name not in keywords}
    return SettingLayer({**layer.data, "model": model}, layer.locations)


def _sort_key(error: SettingError) -> tuple[bool, str, int, int]:
    # the lines of files in their order, then the command line
    return bool(error.location.argument), error.location.file, error.location.line, error.location.column


def _resolve_target(target: str | Path, recipes: RecipeLookup) -> RunTarget:
    name = str(target)
    path = Path(target)
    shipped = shipped_runs()
    if path.is_dir() and (path / RUN_FILE).is_file():
        path = path / RUN_FILE
    is_yaml = path.suffix in (".yaml", ".yml")
    if name in shipped and not (is_yaml and path.is_file()):
        # the name includes the folder, because the stems of lm/stdlib and masked/stdlib are equal
        return RunTarget(name.replace("/", "-"), *extends_chain(shipped[name]))
    problem = recipes.problem(name)
    # A file named bert does not hide the recipe of that name; ./bert means the file.
    if path.is_file() and (is_yaml or problem or path.name != name):
        return RunTarget(path.stem, *extends_chain(path))
    if kind := special_kind(path):
        raise UserErrors([f"{name}: this is {kind}; give a run file"])
    if is_yaml:
        run_files = [str(file) for file in path.parent.glob(f"*{path.suffix}")]
        raise UserErrors([f"{name}: there is no such run file" + _suggestion(suggest_names(name, run_files))])
    if problem:
        suggestion = _suggestion(suggest_names(name, [*shipped, *recipes.names]))
        raise UserErrors(
            [f"there is no run file, shipped run or recipe '{name}'{suggestion}" if suggestion else problem]
        )
    # a class in a file, whose run has a folder without the colon
    return RunTarget(name.replace(".py:", "-"), [SettingLayer({"recipe": name})], [])


def _suggestion(text: str) -> str:
    if text.startswith("did"):
        return f"; {text}"
    return ""


def extends_chain(path: Path) -> tuple[list[SettingLayer], list[SettingError]]:
    """The layers of a file and of all files that it extends, the lowest first, and their errors."""
    layers: list[SettingLayer] = []
    errors: list[SettingError] = []
    visited: list[Path] = []
    current: Path | None = path
    while current is not None:
        visited.append(current.resolve())
        try:
            layer, extends = read_run_file(current, errors)
        except UserError as error:
            raise UserErrors([*map(str, errors), str(error)]) from error
        layers.insert(0, layer)
        if errors and not layer.data:
            raise UserErrors(map(str, errors))  # broken YAML: everything else would be missing
        if extends is None:
            break
        base, problem = find_base_file(extends, current.parent)
        if base is not None and base.resolve() in visited:
            base = None
            problem = f"{extends} extends this file in turn"
        if base is None:
            errors.append(SettingError(layer.location_of(("extends",)), "extends", problem))
        current = base
    return layers, errors


def find_base_file(name: str, folder: Path) -> tuple[Path | None, str]:
    """The file that `extends: name` means in a file in `folder`; None and an error message if there is none."""
    shipped = shipped_runs()
    if name and (folder / name).is_file():
        return folder / name, ""
    if name in shipped:
        return shipped[name], ""
    suggestion = suggest_names(name, [*shipped, *(path.name for path in folder.glob("*.y*ml"))])
    return None, f"there is no shipped run and no file '{name}'{_suggestion(suggestion)}"
