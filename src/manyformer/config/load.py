"""From a run file, a shipped run or a recipe's name, and overrides, to a validated run."""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manyformer.config.overrides import SettingOverride, parse_overrides, place_overrides
from manyformer.config.run import RunConfig
from manyformer.config.run_file import read_run_file
from manyformer.config.setting_layers import SettingError, SettingLayer, SourceLocation, stack
from manyformer.config.setting_names import chosen, tag_of
from manyformer.config.shipped import shipped_runs
from manyformer.config.training_sections import NoamSchedule
from manyformer.config.validation_errors import validate
from manyformer.errors import UserError, UserErrors, nearest

RUN_FILE = "run.yaml"
"""The name under which a run's folder keeps its merged run file."""

# The kinds of data that each task of a recipe learns from, the usual one first.
KINDS = {
    "language-model": ("text", "synthetic", "images"),
    "masked": ("text",),
    "translation": ("pairs",),
    "classification": ("labels",),
    "tagging": ("trees",),
    "image-classification": ("images",),
}


class RunTarget(NamedTuple):
    """Layers of settings, the lowest first, under the name of the run that they describe; and what is wrong there."""

    name: str
    layers: list[SettingLayer]
    mistakes: list[SettingError]


def load_run(
    target: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    signature_of: Callable[[str], inspect.Signature],
    task_of: Callable[[str], str] | None = None,
    recipes: Iterable[str] = (),
) -> RunConfig:
    """The run that a target and overrides describe, `out` filled in.

    `target` is the path of a YAML run file, a run's folder, the name of a shipped run, or a recipe's name. Overrides
    are `key=value`, `--key value` or `--key=value`; a bare model keyword such as `depth=4` means `model.depth` unless
    another setting has that name too. Where a file's recipe is exchanged for another one, those keywords of the file
    stay that the other one has as well. `signature_of` gives a recipe's signature and `task_of` its task, both raising
    ValueError for an unknown name; `recipes` are the names to suggest. Raises UserErrors with every mistake found.
    """
    return merge_run(_open(target, signature_of, recipes), overrides, signature_of=signature_of, task_of=task_of)


def merge_run(
    found: RunTarget,
    overrides: Sequence[str] | Mapping[str, Any],
    *,
    signature_of: Callable[[str], inspect.Signature],
    task_of: Callable[[str], str] | None = None,
) -> RunConfig:
    """The run that layers of settings and overrides describe. Raises UserErrors with every mistake found."""
    given, mistakes = parse_overrides(overrides)
    mistakes = found.mistakes + mistakes
    recipe, spot = _recipe(stack(found.layers), given)
    below = stack(_exchanged(found.layers, recipe, signature_of))
    signature, task, unknown = None, None, _complaint(recipe, signature_of) if recipe else ""
    if unknown:
        mistakes.append(SettingError(spot, "recipe", unknown))
    elif isinstance(recipe, str) and recipe:
        signature, task = signature_of(recipe), task_of(recipe) if task_of else None
    usual = SettingLayer({"data": {"kind": KINDS[task][0]}} if task in KINDS else {})
    base = stack([usual, below])
    top, misplaced = place_overrides(given, base, signature)
    merged = stack([base, top])
    run, wrong = validate(merged, signature, {mistake.path for mistake in found.mistakes} - {""})
    unfit = _unfit(merged, recipe, signature, task)
    if any(mistake.path == "data.kind" for mistake in unfit):
        wrong = [mistake for mistake in wrong if not mistake.path.startswith("data.")]  # of data that is not wanted
    mistakes += misplaced + wrong + unfit
    if any(mistake.path == "extends" for mistake in mistakes):
        mistakes = [mistake for mistake in mistakes if not mistake.message.startswith("is missing")]  # it may be there
    if mistakes or run is None:
        raise UserErrors(dict.fromkeys(str(mistake) for mistake in sorted(mistakes, key=_order)))
    return run if run.out else run.model_copy(update={"out": f"runs/{found.name}"})


def _unfit(
    merged: SettingLayer, recipe: Any, signature: inspect.Signature | None, task: str | None
) -> list[SettingError]:
    """What is wrong between the recipe and the rest of the run."""
    mistakes = []
    data = chosen("data", merged.data)
    if task in KINDS and data is not None and tag_of(data, "kind") not in KINDS[task]:
        what = f"{recipe} ({task}) learns from {' or '.join(KINDS[task])}, not from {tag_of(data, 'kind')}"
        mistakes.append(SettingError(merged.spot(("data", "kind")), "data.kind", what))
    if chosen("schedule", merged.data) is NoamSchedule and signature and "dim" not in signature.parameters:
        schedule = merged.data["schedule"]
        if schedule.get("width") is None:
            what = f"is needed: noam's rate follows the model's dim, and {recipe} has no such keyword"
            mistakes.append(SettingError(merged.spot(("schedule", "name")), "schedule.width", what))
    return mistakes


def _recipe(below: SettingLayer, given: list[SettingOverride]) -> tuple[Any, SourceLocation]:
    for override in reversed(given):
        if override.key == "recipe":
            return override.value, override.spot
    return below.data.get("recipe"), below.spot(("recipe",))


def _exchanged(
    layers: list[SettingLayer], recipe: Any, signature_of: Callable[[str], inspect.Signature]
) -> list[SettingLayer]:
    """The layers for this recipe: without keywords that only the recipe has that they were written for."""
    found, own = [], None
    for layer in layers:
        own = layer.data.get("recipe", own)
        known = [set() if _complaint(name, signature_of) else _keywords(name, signature_of) for name in (own, recipe)]
        found.append(leave_out(layer, known[0] - known[1] if known[1] else ()))
    return found


def _keywords(recipe: Any, signature_of: Callable[[str], inspect.Signature]) -> set[str]:
    return set(signature_of(recipe).parameters) if isinstance(recipe, str) else set()


def leave_out(layer: SettingLayer, keywords: Container[str]) -> SettingLayer:
    """The layer without these keywords of the model."""
    if not isinstance(layer.data.get("model"), dict):
        return layer
    model = {name: value for name, value in layer.data["model"].items() if name not in keywords}
    return SettingLayer({**layer.data, "model": model}, layer.locations)


def _order(mistake: SettingError) -> tuple[bool, str, int, int]:
    return bool(mistake.spot.typed), mistake.spot.file, mistake.spot.line, mistake.spot.column


def _open(target: str | Path, signature_of: Callable[[str], inspect.Signature], recipes: Iterable[str]) -> RunTarget:
    name, path, shipped = str(target), Path(target), shipped_runs()
    if path.is_dir() and (path / RUN_FILE).is_file():
        path = path / RUN_FILE
    is_yaml = path.suffix in (".yaml", ".yml")
    if name in shipped and not (is_yaml and path.is_file()):
        # with its folder, because the stems of lm/stdlib and masked/stdlib are the same
        return RunTarget(name.replace("/", "-"), *chain(shipped[name]))
    unknown = _complaint(name, signature_of)
    # A file that happens to be called bert is not in the way of the recipe; ./bert means the file.
    if path.is_file() and (is_yaml or unknown or path.name != name):
        return RunTarget(path.stem, *chain(path))
    if is_yaml:
        there = [str(other) for other in path.parent.glob(f"*{path.suffix}")]
        raise UserErrors([f"{name}: there is no such run file" + _did(nearest(name, there))])
    if unknown:
        near = _did(nearest(name, [*shipped, *recipes]))
        raise UserErrors([f"there is no run file, shipped run or recipe '{name}'{near}" if near else unknown])
    return RunTarget(name, [SettingLayer({"recipe": name})], [])


def _complaint(name: object, signature_of: Callable[[str], inspect.Signature]) -> str:
    """What is wrong with a recipe's name; nothing where it is no name at all, which validation tells."""
    if not isinstance(name, str):
        return ""
    try:
        signature_of(name)
    except ValueError as error:
        return str(error)
    return ""


def _did(ending: str) -> str:
    return f"; {ending}" if ending.startswith("did") else ""


def chain(path: Path) -> tuple[list[SettingLayer], list[SettingError]]:
    """The layers of a file and of all that it extends, the lowest first."""
    layers: list[SettingLayer] = []
    mistakes: list[SettingError] = []
    seen: list[Path] = []
    following: Path | None = path
    while following is not None:
        seen.append(following.resolve())
        try:
            file = read_run_file(following)
        except UserError as error:
            raise UserErrors([*map(str, mistakes), str(error)]) from error
        layers.insert(0, file.layer)
        mistakes += file.mistakes
        if file.mistakes and not file.layer.data:
            raise UserErrors(map(str, mistakes))  # broken YAML: everything else would be missing
        if file.extends is None:
            break
        spot = file.layer.spot(("extends",))
        base, what = base_file(file.extends, following.parent)
        if base is not None and base.resolve() in seen:
            base, what = None, f"{file.extends} extends this file in turn"
        if base is None:
            mistakes.append(SettingError(spot, "extends", what))
        following = base
    return layers, mistakes


def base_file(name: str, folder: Path) -> tuple[Path | None, str]:
    """The file that `extends: name` means beside a file in `folder`; else None, and what is wrong."""
    shipped = shipped_runs()
    if name and (folder / name).is_file():
        return folder / name, ""
    if name in shipped:
        return shipped[name], ""
    near = nearest(name, [*shipped, *(path.name for path in folder.glob("*.y*ml"))])
    return None, f"there is no shipped run and no file '{name}'{_did(near)}"
