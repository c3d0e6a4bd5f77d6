"""Load a comparison from its file: the base run, the cases over it, and the settings besides.

Each case is a run over the base run, with its trials and the runs that it is scored under."""

import itertools
import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from manyformer.base.errors import UserError, UserErrors, format_value, suggest_names
from manyformer.base.files.json_records import special_kind
from manyformer.config.comparison import CaseTrial, Comparison, ComparisonCase, ComparisonFile, cannot_sweep
from manyformer.config.load import (
    RecipeLookup,
    RunTarget,
    extends_chain,
    find_base_file,
    import_named,
    merge_run,
    model_keywords,
    without_keywords,
)
from manyformer.config.run import RunConfig
from manyformer.config.run_file import read_mapping, split_extends
from manyformer.config.section import ConfigSection
from manyformer.config.setting_layers import SettingError, SettingLayer, stack
from manyformer.config.shipped import run_description, shipped_comparisons
from manyformer.config.validation_errors import error_text

ValidatedSection = TypeVar("ValidatedSection", bound=ConfigSection)


class ComparisonParts(NamedTuple, Generic[ValidatedSection]):
    """What the file of a comparison or a suite holds: its settings, the layers of its base run, and its mappings."""

    name: str
    about: str
    file: ValidatedSection
    layer: SettingLayer
    base_layers: list[SettingLayer]
    mappings: dict[str, SettingLayer]


def load_comparison(target: str | Path, overrides: Sequence[str] = (), *, recipes: RecipeLookup) -> Comparison:
    """Load a comparison from a file or by its shipped name; `overrides` (KEY=VALUE) apply to the runs of all cases.

    Raises UserErrors with every error in the file.
    """
    parts = read_parts(target, ComparisonFile, ("cases",), "a comparison has a base run and cases", recipes)
    cases = read_cases(parts.base_layers, parts.mappings["cases"], parts.file, parts.layer, overrides, recipes)
    return Comparison(parts.name, parts.about, parts.file, cases)


def read_parts(
    target: str | Path,
    kind: type[ValidatedSection],
    keys: Sequence[str],
    meaning: str,
    recipes: RecipeLookup,
) -> ComparisonParts[ValidatedSection]:
    """Read a file with a base run `run`, a mapping of mappings for each of `keys`, and settings of `kind` besides.

    `meaning` says what such a file has. Raises UserErrors with every error in the file.
    """
    name, path = find_comparison(target)
    errors: list[SettingError] = []
    names = [f"`{key}:`" for key in ("run", *keys)]
    layer = read_mapping(path, meaning, f"{', '.join(names[:-1])} and {names[-1]}", errors)
    if errors and not layer.data:
        raise UserErrors(map(str, errors))
    base = take_mapping(layer, "run", errors)
    mappings = {key: take_mapping(layer, key, errors, nested=True) for key in keys}
    file = validate_section(kind, layer, ("run", *keys), errors)
    if not errors:
        missing = [key for key in keys if not mappings[key].data]
        errors += [
            SettingError(layer.location_of((key,)), key, f"is missing: name at least one {key[:-1]}") for key in missing
        ]
    base_layers = read_base(base, path, errors)
    if errors or file is None:
        raise UserErrors(dict.fromkeys(map(str, errors)))
    import_named(stack(base_layers), recipes.import_modules)
    return ComparisonParts(name, run_description(path), file, layer, base_layers, mappings)


def read_cases(
    base_layers: list[SettingLayer],
    cases: SettingLayer,
    file: ComparisonFile,
    file_layer: SettingLayer,
    overrides: Sequence[str],
    recipes: RecipeLookup,
) -> tuple[ComparisonCase, ...]:
    """The cases over the base run. Raises UserErrors with every error."""
    # a case that is `init_from` of another has no saved model yet
    reader = CaseReader(base_layers, cases, file, file_layer, overrides, _without_cases(recipes, cases.data))
    loaded_cases = reader.read_cases()
    reader.check_keywords(loaded_cases)
    if reader.errors:
        raise UserErrors(dict.fromkeys(reader.errors))
    return loaded_cases


def find_comparison(target: str | Path) -> tuple[str, Path]:
    """The name and the file of a comparison. Raises UserError with the most similar names."""
    shipped = shipped_comparisons()
    path = Path(target)
    if str(target) in shipped:
        return str(target), shipped[str(target)]
    if path.is_file():
        return path.stem, path
    if kind := special_kind(Path(target)):
        raise UserError(f"{target}: this is {kind}; give a file")
    raise UserError(f"there is no comparison and no file '{target}'; {suggest_names(str(target), shipped)}")


def take_mapping(layer: SettingLayer, key: str, errors: list[SettingError], *, nested: bool = False) -> SettingLayer:
    """Remove a key from the layer and return its value, which must be a mapping (`nested`: of mappings)."""
    value = layer.data.pop(key, None)
    locations = layer.locations_below((key,))
    parts = {} if value is None else value
    if not isinstance(parts, dict):
        errors.append(SettingError(layer.location_of((key,)), key, f"must be a mapping, not {format_value(parts)}"))
        return SettingLayer()
    for name, part in parts.items():
        if nested and not isinstance(part, dict | None):
            message = f"must be a mapping of settings that differ from the run's, not {format_value(part)}"
            errors.append(SettingError(layer.location_of((key, name)), f"{key}.{name}", message))
    return SettingLayer(parts, locations)


def read_base(base: SettingLayer, path: Path, errors: list[SettingError]) -> list[SettingLayer]:
    """The layers below all cases: the base run and the files that it extends."""
    layer, extends = split_extends(base, errors)
    if extends is None:
        return [layer]
    base_path, problem = find_base_file(extends, path.parent)
    if base_path is None:
        errors.append(SettingError(layer.location_of(("extends",)), "run.extends", problem))
        return [layer]
    layers, chain_errors = extends_chain(base_path)
    errors += chain_errors
    return [*layers, layer]


def validate_section(
    kind: type[ValidatedSection], layer: SettingLayer, taken_names: Sequence[str], errors: list[SettingError]
) -> ValidatedSection | None:
    """The layer as a section, None with the errors collected; `taken_names` were taken from it before."""
    valid_names = [*kind.model_fields, *taken_names]
    try:
        return kind.model_validate(layer.data)
    except ValidationError as error:
        for details in error.errors():
            path = details["loc"]
            message = error_text(details, path, valid_names)
            if details["type"] == "missing":
                message = f"is missing: {kind.model_fields[str(path[0])].description}"
            errors.append(SettingError(layer.location_of(path), str(path[0]), " ".join(message.split())))
        return None


def _without_cases(recipes: RecipeLookup, cases: Container[str]) -> RecipeLookup:
    """The lookup without saved models under the names of cases, which are trained later."""
    describe = recipes.saved_model
    if describe is None:
        return recipes
    return recipes._replace(saved_model=lambda path, out: None if path in cases else describe(path, out))


@dataclass
class CaseReader:
    """Builds the cases and collects their errors.

    A case with its own recipe takes only those model keywords of the base run that its recipe has, so one base run can
    serve recipes without heads, for example. A keyword that no case can take is an error.
    """

    base_layers: list[SettingLayer]
    settings: SettingLayer
    file: ComparisonFile
    file_layer: SettingLayer
    overrides: Sequence[str]
    recipes: RecipeLookup
    errors: list[str] = field(default_factory=list)
    used_keywords: set[str] = field(default_factory=set)

    def read_cases(self) -> tuple[ComparisonCase, ...]:
        cases = tuple(case for name in self.settings.data for case in self._read_case(name))
        by_name = {case.name: case for case in cases}
        for case in cases:
            self._check_weights_source(case, by_name)
            self._check_init_order(case, by_name)
        return cases

    def check_keywords(self, cases: Sequence[ComparisonCase]) -> None:
        """Check that every model keyword of the base run, and a swept one, is a keyword of some case's recipe."""
        valid_names = [f"model.{name}" for case in cases for name in self.recipes.keywords(case.run.recipe)]
        # a keyword that no case has taken
        unknown_names = [
            (layer.location_of(("model", keyword)), f"model.{keyword}")
            for layer in self.base_layers
            for keyword in model_keywords(layer) - self.used_keywords
        ]
        swept = self.file.setting
        if swept is not None and swept.startswith("model.") and cases and swept not in valid_names:
            unknown_names.append((self.file_layer.location_of(("sweep", swept)), swept))
        for location, name in unknown_names:
            self.errors.append(location.format_error(name, "no such setting in the recipe of any case"))

    def _read_case(self, name: str) -> list[ComparisonCase]:
        """The case with its trials, or a case for each of them; empty after an error."""
        layers, trained_by = self._case_layers(name)
        trials = [
            trial
            for combination in self._trial_settings(name)
            if (trial := self._read_trial(name, layers, combination))
        ]
        if not trials:
            return []
        init_from = trials[0].run.init_from
        init_from_case = None
        if init_from in self.settings.data:
            init_from_case = init_from
        case = ComparisonCase(name, tuple(trials), trained_by, init_from_case)
        if self.file.select == "best":
            return [case]
        return [_single_trial(case, trial) for trial in trials]

    def _trial_settings(self, name: str) -> Iterator[dict[str, Any]]:
        """The combinations of the values of all trials, the case's own or the file's; one empty one without trials."""
        trials: dict[str, list[Any]] = dict(self.file.trials)
        # a case that uses the weights of another has its trials
        for case_name in (name, str((self.settings.data[name] or {}).get("trained"))):
            case = self.settings.data.get(case_name) or {}
            if "trials" in case:
                trials = self._check_trials(case_name, case["trials"])
                break
        for values in itertools.product(*trials.values()):
            yield dict(zip(trials, values))

    def _check_trials(self, name: str, trials: Any) -> dict[str, list[Any]]:
        """The trials of a case; none after an error."""
        if isinstance(trials, dict) and all(isinstance(values, list) and values for values in trials.values()):
            return trials
        location = self.settings.location_of((name, "trials"))
        message = f"must be settings with a list of values each, not {format_value(trials)}"
        self.errors.append(location.format_error(f"{name}.trials", message))
        return {}

    def _read_trial(self, name: str, layers: list[SettingLayer], settings: dict[str, Any]) -> CaseTrial | None:
        changes = [f"{setting}={json.dumps(value)}" for setting, value in settings.items()]
        run = self._merge(name, layers, *changes)
        if run is None:
            return None
        swept = self.file.setting or ""
        if swept.startswith("data.") and swept.removeprefix("data.") not in run.data.swept:
            location = self.file_layer.location_of(("sweep",))
            self.errors.append(location.format_error("sweep", cannot_sweep(swept, run.data.swept)))
            return None
        points: list[RunConfig | None] = [run]
        for setting, values in self.file.sweep.items():
            keywords = self.recipes.keywords(run.recipe)
            applies = not setting.startswith("model.") or setting.removeprefix("model.") in keywords
            points = [
                self._merge(name, layers, *changes, f"{setting}={json.dumps(value)}") if applies else None
                for value in values
            ]
        label = ", ".join(f"{setting} {format_value(value)}" for setting, value in settings.items())
        return CaseTrial(label, run, tuple(points))

    def _check_weights_source(self, case: ComparisonCase, by_name: dict[str, ComparisonCase]) -> None:
        """Check that a case that uses trained weights differs from the trained case in model keywords only."""
        trained = by_name.get(case.trained_by or "")
        if trained and trained.run.model_copy(update={"model": case.run.model, "out": case.run.out}) != case.run:
            problem = f"it takes the weights of {trained.name}, so nothing but its model may have other settings"
            self.errors.append(f"case {case.name}: {problem}")

    def _check_init_order(self, case: ComparisonCase, by_name: dict[str, ComparisonCase]) -> None:
        """Check that the source of initial weights is a trained case and that there is no cycle."""
        source = by_name.get(case.init_from_case or "")
        visited = {case.name}
        # from source to source until a case begins with random weights; a cycle comes back to a visited one
        while source is not None and source.trained_by is None and source.name not in visited:
            visited.add(source.name)
            source = by_name.get(source.init_from_case or "")
        if source is not None:
            problem = f"{case.init_from_case} must be a case that is trained itself, and before this one"
            self.errors.append(f"case {case.name}: init_from: {problem}")

    def _case_layers(self, name: str) -> tuple[list[SettingLayer], str | None]:
        """The layers of a case above those of its `trained` case and the base run, and the name of that case."""
        cases = self.settings.data
        # a copy, from which `trained` and the trials are taken
        case_layer = SettingLayer(dict(cases[name] or {}), self.settings.locations_below((name,)))
        trained_by = case_layer.data.pop("trained", None)
        case_layer.data.pop("trials", None)
        own_layer, _ = split_extends(case_layer, [])
        if trained_by is None:
            return [*self._base_layers_for(case_layer.data.get("recipe")), own_layer], None
        if trained_by == name or trained_by not in cases or "trained" in (cases[trained_by] or {}):
            suggestion = suggest_names(str(trained_by), cases.keys() - {name})
            message = f"must be another case that is trained itself, not {format_value(trained_by)}; {suggestion}"
            self.errors.append(case_layer.location_of(("trained",)).format_error(f"{name}.trained", message))
            return [*self.base_layers, own_layer], None
        return [*self._case_layers(trained_by)[0], own_layer], str(trained_by)

    def _base_layers_for(self, recipe: Any) -> list[SettingLayer]:
        """The layers of the base run without the model keywords that a case's own `recipe` does not have."""
        keywords = self.recipes.keywords(recipe)
        layers = [
            without_keywords(layer, model_keywords(layer) - keywords) if keywords else layer
            for layer in self.base_layers
        ]
        self.used_keywords.update(*map(model_keywords, layers))
        return layers

    def _merge(self, name: str, layers: list[SettingLayer], *extra_overrides: str) -> RunConfig | None:
        """Merge layers, overrides and extra overrides into a run; None if that fails, with the errors collected."""
        try:
            return merge_run(RunTarget(name, layers, []), [*self.overrides, *extra_overrides], self.recipes)
        except UserErrors as error:
            # each message names its source location, which for the base run is the same for all cases
            self.errors += error.lines
            return None


def _single_trial(case: ComparisonCase, trial: CaseTrial) -> ComparisonCase:
    """The case of one of the trials of `case`, which uses the weights of the cases with the same settings."""

    # read before the trial loses its label below: the function is called after that too
    label = trial.label

    def renamed(name: str) -> str:
        return f"{name}, {label}"

    trained_by = None
    if case.trained_by is not None:
        trained_by = renamed(case.trained_by)
    trial = replace(trial, label="")
    source = None
    if case.init_from_case is not None:
        source = renamed(case.init_from_case)
        trial = trial.with_runs(lambda run: run.model_copy(update={"init_from": source}))
    return ComparisonCase(renamed(case.name), (trial,), trained_by, source)
