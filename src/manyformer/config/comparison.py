"""Configuration of comparisons: the runs of the cases, the settings they are scored under, and the claims."""

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError

from manyformer.config.data_sections import swept_settings
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
from manyformer.config.section import ConfigSection, PathText, PositiveInt, SettingConflict, TupleOrText
from manyformer.config.setting_layers import SettingError, SettingLayer, stack
from manyformer.config.setting_names import renamed_setting
from manyformer.config.shipped import run_description, shipped_comparisons
from manyformer.config.validation_errors import error_text
from manyformer.config.yaml_scalars import format_value
from manyformer.errors import UserError, UserErrors, suggest_names

CostName = Literal["parameters", "minutes", "tokens", "step", "memory"]


class ComparisonFile(ConfigSection):
    """The settings of a comparison file besides its base run and its cases."""

    title: PathText
    """What is compared, in one line: the title of the table and the figure."""
    seeds: PositiveInt = 1
    """How many times each case is trained; the seeds count up from the seed of the run."""
    score: Annotated[tuple[PathText, ...], TupleOrText, Field(min_length=1)] = ("loss",)
    """Scores of the trained models, the main one first: loss, accuracy, perplexity, bits_per_byte, or a score of
    `manyformer evaluate` by its name, such as bleu."""
    split: Literal["valid", "test"] = "valid"
    """The held-out data that the models are scored on."""
    sweep: Annotated[dict[str, list[JsonValue]], Field(max_length=1)] = Field(default_factory=dict)
    """One setting of the run and several values: the trained models are scored under each of them."""
    cost: Annotated[tuple[CostName, ...], TupleOrText] = ("parameters", "minutes")
    """Cost columns of the table: parameters, minutes (of training), tokens (trained on), step (time of a training step,
    measured in turns), memory (of a training step)."""
    claims: Annotated[tuple[PathText, ...], TupleOrText] = ()
    """Expected results, such as `alibi@256 <= alibi@64 + 0.03` for the first score, or for another score or cost
    `step of short <= long * 0.9`; the report says which of them hold."""

    @property
    def setting(self) -> str | None:
        """The name of the swept setting, None without a sweep."""
        return next(iter(self.sweep), None)

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.setting and not self.setting.startswith(("model.", "data.")):
            yield SettingConflict(("sweep",), cannot_sweep(self.setting, swept_settings()))


def cannot_sweep(setting: str, swept: Sequence[str]) -> str:
    """The error message for a setting that cannot be swept, where the data settings `swept` can."""
    names = [f"data.{name}" for name in swept]
    message = f"'{setting}' cannot be changed after training; model.KEYWORD and {', '.join(names)} can"
    return renamed_setting(setting, [f"data.{name}" for name in swept_settings()]) or message


@dataclass(frozen=True)
class ComparisonCase:
    """One row of the table: a run and the settings it is scored under.

    `trained_by` names the case whose trained weights it uses, None if it is trained itself. `points` are the runs it is
    scored under, one for each value of the sweep (or only its own run), None if its recipe has no such setting.
    `init_from_case` names the case whose final weights, of the same seed, initialize its training."""

    name: str
    run: RunConfig
    trained_by: str | None
    points: tuple[RunConfig | None, ...]
    init_from_case: str | None = None


@dataclass(frozen=True)
class Comparison:
    """A validated comparison: its settings and its cases."""

    name: str
    about: str
    file: ComparisonFile
    cases: tuple[ComparisonCase, ...]

    @property
    def setting(self) -> str | None:
        """The name of the swept setting, None without a sweep."""
        return self.file.setting

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the sweep; a single None without a sweep."""
        return tuple(next(iter(self.file.sweep.values()), [None]))

    def case(self, name: str) -> ComparisonCase:
        """The case with this name."""
        return next(case for case in self.cases if case.name == name)

    def stage(self, case: ComparisonCase) -> int:
        """The number of cases that must be trained one after the other before this one."""
        return 0 if case.init_from_case is None else 1 + self.stage(self.case(case.init_from_case))


def load_comparison(target: str | Path, overrides: Sequence[str] = (), *, recipes: RecipeLookup) -> Comparison:
    """Load a comparison from a file or by its shipped name; `overrides` (KEY=VALUE) apply to the runs of all cases.

    Raises UserErrors with every error in the file.
    """
    name, path = find_comparison(target)
    errors: list[SettingError] = []
    layer = read_mapping(path, "a comparison has a base run and cases", "`run:` and `cases:`", errors)
    if errors and not layer.data:
        raise UserErrors(map(str, errors))
    base, cases = (_take_mapping(layer, key, errors) for key in ("run", "cases"))
    file = _validate_file(layer, errors)
    if not cases.data and not errors:
        errors.append(SettingError(layer.location_of(("cases",)), "cases", "is missing: name at least one case"))
    base_layers = _read_base(base, path, errors)
    if errors or file is None:
        raise UserErrors(dict.fromkeys(map(str, errors)))
    import_named(stack(base_layers), recipes.import_modules)
    reader = _CaseReader(base_layers, cases, file, layer, overrides, _without_cases(recipes, cases.data))
    loaded_cases = reader.read_cases()
    reader.check_keywords(loaded_cases)
    if reader.errors:
        raise UserErrors(dict.fromkeys(reader.errors))
    return Comparison(name, run_description(path), file, loaded_cases)


def _without_cases(recipes: RecipeLookup, cases: Container[str]) -> RecipeLookup:
    """The lookup without saved models under the names of cases, which are trained later."""
    describe = recipes.saved_model
    if describe is None:
        return recipes
    return recipes._replace(saved_model=lambda path, out: None if path in cases else describe(path, out))


@dataclass
class _CaseReader:
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
        cases = tuple(case for case in map(self._read_case, self.settings.data) if case is not None)
        by_name = {case.name: case for case in cases}
        for case in cases:
            self._check_weights_source(case, by_name)
            self._check_init_order(case, by_name)
        return cases

    def check_keywords(self, cases: Sequence[ComparisonCase]) -> None:
        """Check that every model keyword of the base run, and a swept one, is a keyword of some case's recipe."""
        valid_names = [f"model.{name}" for case in cases for name in self.recipes.keywords(case.run.recipe)]
        unknown_names = [
            (layer.location_of(("model", keyword)), f"model.{keyword}")
            for layer in self.base_layers
            for keyword in model_keywords(layer) - self.used_keywords
        ]
        swept = self.file.setting
        if swept is not None and swept.startswith("model.") and cases and swept not in valid_names:
            unknown_names.append((self.file_layer.location_of(("sweep", swept)), swept))
        for location, name in unknown_names:
            renamed = renamed_setting(name, valid_names)
            reason = "no such setting in the recipe of any case" + (f"; {renamed}" if renamed else "")
            self.errors.append(location.format_error(name, reason))

    def _read_case(self, name: str) -> ComparisonCase | None:
        layers, trained_by = self._case_layers(name)
        run = self._merge(name, layers)
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
                self._merge(name, layers, f"{setting}={json.dumps(value)}") if applies else None for value in values
            ]
        init_from_case = run.init_from if run.init_from in self.settings.data else None
        return ComparisonCase(name, run, trained_by, tuple(points), init_from_case)

    def _check_weights_source(self, case: ComparisonCase, by_name: dict[str, ComparisonCase]) -> None:
        """Check that a case that uses trained weights differs from the trained case in model keywords only."""
        trained = by_name.get(case.trained_by or "")
        if trained and trained.run.model_copy(update={"model": case.run.model, "out": case.run.out}) != case.run:
            problem = f"it takes the weights of {trained.name}, so nothing but its model may have other settings"
            self.errors.append(f"case {case.name}: {problem}")

    def _check_init_order(self, case: ComparisonCase, by_name: dict[str, ComparisonCase]) -> None:
        """Check that the source of initial weights is a trained case and that there is no cycle."""
        source, visited = by_name.get(case.init_from_case or ""), {case.name}
        while source is not None and source.trained_by is None and source.name not in visited:
            visited.add(source.name)
            source = by_name.get(source.init_from_case or "")
        if source is not None:
            problem = f"{case.init_from_case} must be a case that is trained itself, and before this one"
            self.errors.append(f"case {case.name}: init_from: {problem}")

    def _case_layers(self, name: str) -> tuple[list[SettingLayer], str | None]:
        """The layers of a case above those of its `trained` case and the base run, and the name of that case."""
        cases = self.settings.data
        case_layer = SettingLayer(dict(cases[name] or {}), self.settings.locations_below((name,)))
        trained_by = case_layer.data.pop("trained", None)
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


def find_comparison(target: str | Path) -> tuple[str, Path]:
    """The name and the file of a comparison. Raises UserError with the most similar names."""
    shipped, path = shipped_comparisons(), Path(target)
    if str(target) in shipped:
        return str(target), shipped[str(target)]
    if path.is_file():
        return path.stem, path
    raise UserError(f"there is no comparison and no file '{target}'; {suggest_names(str(target), shipped)}")


def _take_mapping(layer: SettingLayer, key: str, errors: list[SettingError]) -> SettingLayer:
    """Remove a key from the layer and return its value, which must be a mapping (`cases`: of mappings)."""
    value, locations = layer.data.pop(key, None), layer.locations_below((key,))
    parts = {} if value is None else value
    if not isinstance(parts, dict):
        errors.append(SettingError(layer.location_of((key,)), key, f"must be a mapping, not {format_value(parts)}"))
        return SettingLayer()
    for name, part in parts.items() if key == "cases" else ():
        if not isinstance(part, dict | None):
            message = f"must be a mapping of settings that differ from the run's, not {format_value(part)}"
            errors.append(SettingError(layer.location_of((key, name)), f"{key}.{name}", message))
    return SettingLayer(parts, locations)


def _read_base(base: SettingLayer, path: Path, errors: list[SettingError]) -> list[SettingLayer]:
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


def _validate_file(layer: SettingLayer, errors: list[SettingError]) -> ComparisonFile | None:
    valid_names = [*ComparisonFile.model_fields, "run", "cases"]
    try:
        return ComparisonFile.model_validate(layer.data)
    except ValidationError as error:
        for details in error.errors():
            path = details["loc"]
            message = error_text(details, path, valid_names)
            if details["type"] == "missing":
                message = f"is missing: {ComparisonFile.model_fields[str(path[0])].description}"
            errors.append(SettingError(layer.location_of(path), str(path[0]), " ".join(message.split())))
        return None
