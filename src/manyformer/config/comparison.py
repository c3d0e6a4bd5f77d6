"""Configuration of comparisons: the runs of the cases, the settings they are scored under, and the claims."""

import inspect
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, JsonValue, ValidationError

from manyformer.config.load import (
    ImportFn,
    RunTarget,
    TaskProtocol,
    extends_chain,
    find_base_file,
    import_named,
    merge_run,
    without_keywords,
)
from manyformer.config.run import RunConfig
from manyformer.config.run_file import as_run_file, read_mapping
from manyformer.config.section import ConfigSection, PathText, PositiveInt
from manyformer.config.setting_layers import SettingError, SettingLayer, SettingPath, SourceLocation, stack
from manyformer.config.setting_names import renamed_setting
from manyformer.config.shipped import run_description, shipped_comparisons
from manyformer.config.validation_errors import error_text
from manyformer.config.yaml_scalars import format_value
from manyformer.errors import UserError, UserErrors, suggest_names

CostName = Literal["parameters", "minutes", "tokens", "step", "memory"]

SWEPT_DATA = ("length", "max_length", "packing", "masking", "context", "num_hops", "digits")
"""Data settings that may be swept: they only arrange the data; any other would score a model on different data."""


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


ScoreNames = Annotated[tuple[PathText, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class ComparisonFile(ConfigSection):
    """The settings of a comparison file besides its base run and its cases."""

    title: PathText
    """What is compared, in one line: the title of the table and the figure."""
    seeds: PositiveInt = 1
    """How many times each case is trained; the seeds count up from the seed of the run."""
    score: ScoreNames = ("loss",)
    """Scores of the trained models, the main one first: loss, accuracy, perplexity, bits_per_byte, or a score of
    `manyformer evaluate` by its name, such as bleu."""
    split: Literal["valid", "test"] = "valid"
    """The held-out data that the models are scored on."""
    sweep: Annotated[dict[str, list[JsonValue]], Field(max_length=1)] = Field(default_factory=dict)
    """One setting of the run and several values: the trained models are scored under each of them."""
    cost: Annotated[tuple[CostName, ...], BeforeValidator(_as_tuple)] = ("parameters", "minutes")
    """Cost columns of the table: parameters, minutes (of training), tokens (trained on), step (time of a training step,
    measured in turns), memory (of a training step)."""
    claims: Annotated[tuple[PathText, ...], BeforeValidator(_as_tuple)] = ()
    """Expected results, such as `alibi@256 <= alibi@64 + 0.03` for the first score, or for another score or cost
    `step of short <= long * 0.9`; the report says which of them hold."""


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
        return next(iter(self.file.sweep), None)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the sweep; a single None without a sweep."""
        return (None,) if self.setting is None else tuple(self.file.sweep[self.setting])

    def case(self, name: str) -> ComparisonCase:
        """The case with this name."""
        return next(case for case in self.cases if case.name == name)

    def stage(self, case: ComparisonCase) -> int:
        """The number of cases that must be trained one after the other before this one."""
        return 0 if case.init_from_case is None else 1 + self.stage(self.case(case.init_from_case))


class RecipeLookup(NamedTuple):
    """Look up a recipe's signature and task by its name; both functions raise ValueError for unknown names.

    `import_modules` imports the modules that runs name under `import`; None imports none."""

    signature_of: Callable[[str], inspect.Signature]
    task_of: Callable[[str], TaskProtocol]
    import_modules: ImportFn | None = None


def load_comparison(target: str | Path, overrides: Sequence[str] = (), *, recipes: RecipeLookup) -> Comparison:
    """Load a comparison from a file or by its shipped name; `overrides` (KEY=VALUE) apply to the runs of all cases.

    Raises UserErrors with every error in the file.
    """
    name, path = find_comparison(target)
    layer, errors = read_mapping(path, "a comparison has a base run and cases", "`run:` and `cases:`")
    if errors and not layer.data:
        raise UserErrors(map(str, errors))
    base, cases = (_take_mapping(layer, key, errors) for key in ("run", "cases"))
    file = _validate_file(layer, errors)
    if not cases.data and not errors:
        errors.append(SettingError(layer.location_of(("cases",)), "cases", "is missing: name at least one case"))
    base_layers = _read_base(base, path, errors)
    if errors or file is None:
        raise UserErrors(dict.fromkeys(map(str, errors)))
    if recipes.import_modules is not None:
        import_named(stack(base_layers), recipes.import_modules)
    reader = _CaseReader(base_layers, cases, file, overrides, recipes)
    loaded_cases = reader.cases()
    if reader.errors:
        raise UserErrors(dict.fromkeys(reader.errors))
    return Comparison(name, run_description(path), file, loaded_cases)


class _CaseReader:
    """Builds the cases and collects their errors.

    A case with its own recipe takes only those model keywords of the base run that its recipe has, so one base run can
    serve recipes without heads, for example. A keyword that no case can take is an error.
    """

    def __init__(
        self,
        base_layers: list[SettingLayer],
        cases: SettingLayer,
        file: ComparisonFile,
        overrides: Sequence[str],
        recipes: RecipeLookup,
    ) -> None:
        self._base_layers, self._case_settings, self._file, self._overrides, self._recipes = (
            base_layers,
            cases,
            file,
            overrides,
            recipes,
        )
        self.errors: list[str] = []
        self._used_keywords: set[str] = set()

    def cases(self) -> tuple[ComparisonCase, ...]:
        cases = [case for case in map(self._read_case, self._case_settings.data) if case is not None]
        self._check_init_order(cases)
        keywords = [
            f"model.{name}" for case in cases for name in self._recipes.signature_of(case.run.recipe).parameters
        ]
        for layer in self._base_layers:
            for keyword in set(layer.data.get("model") or {}) - self._used_keywords:
                location = layer.location_of(("model", keyword))
                renamed = renamed_setting(f"model.{keyword}", keywords)
                reason = "no such setting in the recipe of any case" + (f"; {renamed}" if renamed else "")
                self.errors.append(location.format_error(f"model.{keyword}", reason))
        return tuple(cases)

    def _read_case(self, name: str) -> ComparisonCase | None:
        layers, trained_by = self._case_layers(name)
        run = self._merge(name, layers)
        if run is None:
            return None
        if trained_by is not None:
            self._check_same_training(name, run, trained_by)
        points = tuple(self._sweep_point(name, layers, run, value) for value in self._values())
        return ComparisonCase(
            name, run, trained_by, points, run.init_from if run.init_from in self._case_settings.data else None
        )

    def _check_init_order(self, cases: list[ComparisonCase]) -> None:
        """Check that the source of initial weights of each case is a trained case and that there is no cycle."""
        by_name = {case.name: case for case in cases}
        for case in cases:
            source, visited = by_name.get(case.init_from_case or ""), {case.name}
            while source is not None and source.trained_by is None and source.name not in visited:
                visited.add(source.name)
                source = by_name.get(source.init_from_case or "")
            if source is not None:
                self.errors.append(
                    f"case {case.name}: init_from: {case.init_from_case} must be a case that is trained itself, and "
                    "before this one"
                )

    def _values(self) -> list[Any]:
        return next(iter(self._file.sweep.values()), [None])

    def _case_layers(self, name: str) -> tuple[list[SettingLayer], str | None]:
        """The layers of a case above those of its `trained` case and the base run, and the name of that case."""
        case_layer = SettingLayer(
            dict(self._case_settings.data[name] or {}), self._case_settings.locations_below((name,))
        )
        trained_by = case_layer.data.pop("trained", None)
        if trained_by is None:
            return [*self._base_layers_for(case_layer.data.get("recipe")), as_run_file(case_layer, []).layer], None
        if (
            trained_by == name
            or trained_by not in self._case_settings.data
            or "trained" in (self._case_settings.data[trained_by] or {})
        ):
            candidates = [candidate for candidate in self._case_settings.data if candidate != name]
            message = f"{name}.trained: must be another case that is trained itself, not {format_value(trained_by)}"
            self.errors.append(
                case_layer.location_of(("trained",)).format_error(
                    "", f"{message}; {suggest_names(str(trained_by), candidates)}"
                )
            )
            return [*self._base_layers, as_run_file(case_layer, []).layer], None
        return [*self._case_layers(trained_by)[0], as_run_file(case_layer, []).layer], str(trained_by)

    def _base_layers_for(self, recipe: Any) -> list[SettingLayer]:
        """The layers of the base run without model keywords that `recipe` does not have."""
        try:
            parameters = None if recipe is None else self._recipes.signature_of(recipe).parameters
        except ValueError:
            # reported when the run is merged
            parameters = None
        layers = [without_keywords(layer, _unknown_keywords(layer, parameters)) for layer in self._base_layers]
        self._used_keywords |= {keyword for layer in layers for keyword in layer.data.get("model") or {}}
        return layers

    def _merge(self, name: str, layers: list[SettingLayer], *extra_overrides: str) -> RunConfig | None:
        """Merge layers, overrides and extra overrides into a run; None if that fails, with the errors collected."""
        recipes = self._recipes
        target = RunTarget(name, layers, [])
        try:
            return merge_run(
                target,
                [*self._overrides, *extra_overrides],
                signature_of=recipes.signature_of,
                task_of=recipes.task_of,
                import_modules=recipes.import_modules,
            )
        except UserErrors as error:
            # each message names its source location, which for the base run is the same for all cases
            self.errors += error.lines
            return None

    def _sweep_point(self, name: str, layers: list[SettingLayer], run: RunConfig, value: Any) -> RunConfig | None:
        """The run under one value of the sweep; None if its recipe has no such keyword."""
        if not self._file.sweep:
            return run
        setting = next(iter(self._file.sweep))
        section, _, key = setting.partition(".")
        if section not in ("model", "data") or (section == "data" and key not in SWEPT_DATA):
            allowed = ", ".join(f"data.{name}" for name in SWEPT_DATA)
            self.errors.append(f"sweep: '{setting}' cannot be changed after training; model.KEYWORD and {allowed} can")
            return None
        if section == "model" and key not in self._recipes.signature_of(run.recipe).parameters:
            return None
        return self._merge(name, layers, f"{setting}={json.dumps(value)}")

    def _check_same_training(self, name: str, run: RunConfig, trained_by: str) -> None:
        """Check that a case that uses trained weights differs from the trained case in model keywords only."""
        trained_run = self._merge(trained_by, self._case_layers(trained_by)[0])
        if trained_run is None:
            return
        if run.model_copy(update={"model": {}, "out": None}) != trained_run.model_copy(
            update={"model": {}, "out": None}
        ):
            self.errors.append(
                f"case {name}: it takes the weights of {trained_by}, so nothing but its model may have other settings"
            )


def _unknown_keywords(layer: SettingLayer, parameters: Container[str] | None) -> list[str]:
    """The model keywords of a layer that are not in `parameters`; none if `parameters` is None."""
    model = layer.data.get("model")
    return (
        [] if parameters is None or not isinstance(model, dict) else [name for name in model if name not in parameters]
    )


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
    file = as_run_file(base, [])
    errors += file.errors
    if file.extends is None:
        return [file.layer]
    base_path, problem = find_base_file(file.extends, path.parent)
    if base_path is None:
        errors.append(SettingError(file.layer.location_of(("extends",)), "run.extends", problem))
        return [file.layer]
    layers, chain_errors = extends_chain(base_path)
    errors += chain_errors
    return [*layers, file.layer]


def _validate_file(layer: SettingLayer, errors: list[SettingError]) -> ComparisonFile | None:
    valid_names = [*ComparisonFile.model_fields, "run", "cases"]
    try:
        return ComparisonFile.model_validate(layer.data)
    except ValidationError as error:
        for details in error.errors():
            path: SettingPath = tuple(part for part in details["loc"] if isinstance(part, str | int))
            message = error_text(details, path, valid_names)
            if details["type"] == "missing":
                message = f"is missing: {ComparisonFile.model_fields[str(path[0])].description}"
            location = (
                layer.locations.get(path) or layer.locations.get(path[:1]) or layer.locations.get((), SourceLocation())
            )
            errors.append(SettingError(location, ".".join(map(str, path[:1])), " ".join(message.split())))
        return None
