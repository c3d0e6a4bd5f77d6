"""A comparison as one validated record: the runs of its cases, the settings they are scored under, what is claimed."""

import inspect
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, JsonValue, ValidationError

from manyformer.config.load import RunTarget, base_file, chain, leave_out, merge_run
from manyformer.config.run import RunConfig
from manyformer.config.run_file import as_run_file, read_mapping
from manyformer.config.section import ConfigSection, PathText, PositiveInt
from manyformer.config.setting_layers import SettingError, SettingLayer, SourceLocation
from manyformer.config.setting_layers import SettingPath as Spots
from manyformer.config.shipped import about_run, shipped_comparisons
from manyformer.config.validation_errors import sentence
from manyformer.config.yaml_scalars import show
from manyformer.errors import UserError, UserErrors, nearest

CostName = Literal["parameters", "minutes", "tokens", "step", "memory"]

SWEPT_DATA = ("length", "max_length", "packing", "masking", "context", "asked", "digits")
"""The settings of data that only arrange it: under others a trained model would be scored on something else."""


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


ScoreNames = Annotated[tuple[PathText, ...], BeforeValidator(_listed), Field(min_length=1)]


class ComparisonFile(ConfigSection):
    """What stands in a comparison's file beside its base run and its cases."""

    title: PathText
    """What is compared, in a line: it stands above the table and the picture."""
    seeds: PositiveInt = 1
    """How many times each case is trained, with seeds that count from that of the run."""
    score: ScoreNames = ("loss",)
    """What the trained models are scored by, the first first: loss, accuracy, perplexity, bits_per_byte, or a score of
    `manyformer evaluate` by its name, such as bleu."""
    split: Literal["valid", "test"] = "valid"
    """The held-out data that they are scored on."""
    sweep: Annotated[dict[str, list[JsonValue]], Field(max_length=1)] = Field(default_factory=dict)
    """One setting of the run and several values: the trained models are scored again under each of them."""
    cost: Annotated[tuple[CostName, ...], BeforeValidator(_listed)] = ("parameters", "minutes")
    """What else the table tells: parameters, minutes (of training), tokens (learned from), step (its time, in turns),
    memory (of a step)."""
    claims: Annotated[tuple[PathText, ...], BeforeValidator(_listed)] = ()
    """What should come out, such as `alibi@256 <= alibi@64 + 0.03` for the first score, or for another score or cost
    `step of short <= long * 0.9`; the report says what does."""


@dataclass(frozen=True)
class ComparisonCase:
    """One row of the table: a run, and how it is scored.

    `trained_by` names the case whose trained weights it takes; None where it is trained itself. `points` are the runs
    that it is scored under, one for each value of the sweep (or just its own); None where it has no such setting.
    `init_from_case` names the case whose final weights its training begins with, for each seed its own."""

    name: str
    run: RunConfig
    trained_by: str | None
    points: tuple[RunConfig | None, ...]
    init_from_case: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Everything that a comparison does."""

    name: str
    about: str
    file: ComparisonFile
    cases: tuple[ComparisonCase, ...]

    @property
    def setting(self) -> str | None:
        """The setting that is swept."""
        return next(iter(self.file.sweep), None)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the sweep; one None where nothing is swept."""
        return (None,) if self.setting is None else tuple(self.file.sweep[self.setting])

    def case(self, name: str) -> ComparisonCase:
        """The case of that name."""
        return next(case for case in self.cases if case.name == name)

    def stage(self, case: ComparisonCase) -> int:
        """How many cases must be trained one after the other before this one."""
        return 0 if case.init_from_case is None else 1 + self.stage(self.case(case.init_from_case))


class RecipeLookup(NamedTuple):
    """What the configuration must know of recipes: both functions raise ValueError for unknown names."""

    signature_of: Callable[[str], inspect.Signature]
    task_of: Callable[[str], str]


def load_comparison(target: str | Path, overrides: Sequence[str] = (), *, recipes: RecipeLookup) -> Comparison:
    """The comparison in a file or of a shipped name, with `overrides` (KEY=VALUE) laid over the runs of all cases.

    Raises UserErrors with every mistake found.
    """
    name, path = find_comparison(target)
    layer, mistakes = read_mapping(path, "a comparison has a base run and cases", "`run:` and `cases:`")
    if mistakes and not layer.data:
        raise UserErrors(map(str, mistakes))
    base, cases = (_mapping(layer, key, mistakes) for key in ("run", "cases"))
    file = _validated(layer, mistakes)
    if not cases.data and not mistakes:
        mistakes.append(SettingError(layer.spot(("cases",)), "cases", "is missing: name at least one case"))
    under = _base(base, path, mistakes)
    if mistakes or file is None:
        raise UserErrors(dict.fromkeys(map(str, mistakes)))
    reader = _Reader(under, cases, file, overrides, recipes)
    found = reader.cases()
    if reader.mistakes:
        raise UserErrors(dict.fromkeys(reader.mistakes))
    return Comparison(name, about_run(path), file, found)


class _Reader:
    """Makes the cases, and collects what is wrong with them.

    A case with a recipe of its own takes those keywords of the base's model that its recipe has: one base serves also
    recipes that have no heads, say. What no case can take is a mistake.
    """

    def __init__(
        self,
        under: list[SettingLayer],
        cases: SettingLayer,
        file: ComparisonFile,
        overrides: Sequence[str],
        recipes: RecipeLookup,
    ) -> None:
        self._under, self._all, self._file, self._overrides, self._recipes = under, cases, file, overrides, recipes
        self.mistakes: list[str] = []
        self._taken: set[str] = set()

    def cases(self) -> tuple[ComparisonCase, ...]:
        found = [case for case in map(self._case, self._all.data) if case is not None]
        self._refuse_circles(found)
        for layer in self._under:
            for keyword in set(layer.data.get("model") or {}) - self._taken:
                spot = layer.spot(("model", keyword))
                self.mistakes.append(spot.sentence(f"model.{keyword}", "no such setting in the recipe of any case"))
        return tuple(found)

    def _case(self, name: str) -> ComparisonCase | None:
        layers, trained = self._layers(name)
        run = self._run(name, layers)
        if run is None:
            return None
        if trained is not None:
            self._refuse_untrained(name, run, trained)
        points = tuple(self._point(name, layers, run, value) for value in self._values())
        return ComparisonCase(name, run, trained, points, run.start if run.start in self._all.data else None)

    def _refuse_circles(self, cases: list[ComparisonCase]) -> None:
        """What a case begins with must be trained before it, by a training of its own."""
        by_name = {case.name: case for case in cases}
        for case in cases:
            before, met = by_name.get(case.init_from_case or ""), {case.name}
            while before is not None and before.trained_by is None and before.name not in met:
                met.add(before.name)
                before = by_name.get(before.init_from_case or "")
            if before is not None:
                self.mistakes.append(
                    f"case {case.name}: start: {case.init_from_case} must be a case that is trained itself, and before this one"
                )

    def _values(self) -> list[Any]:
        return next(iter(self._file.sweep.values()), [None])

    def _layers(self, name: str) -> tuple[list[SettingLayer], str | None]:
        """The layers of a case over those of the case it is trained as, over the base; and the name of the latter."""
        own = SettingLayer(dict(self._all.data[name] or {}), self._all.below((name,)))
        trained = own.data.pop("trained", None)
        if trained is None:
            return [*self._below(own.data.get("recipe")), as_run_file(own, []).layer], None
        if trained == name or trained not in self._all.data or "trained" in (self._all.data[trained] or {}):
            others = [other for other in self._all.data if other != name]
            what = f"{name}.trained: must be another case that is trained itself, not {show(trained)}"
            self.mistakes.append(own.spot(("trained",)).sentence("", f"{what}; {nearest(str(trained), others)}"))
            return [*self._under, as_run_file(own, []).layer], None
        return [*self._layers(trained)[0], as_run_file(own, []).layer], str(trained)

    def _below(self, recipe: Any) -> list[SettingLayer]:
        """The base's layers, without keywords that a case's own recipe has not."""
        try:
            known = None if recipe is None else self._recipes.signature_of(recipe).parameters
        except ValueError:
            # told where the run is put together
            known = None
        kept = [leave_out(layer, _unknown(layer, known)) for layer in self._under]
        self._taken |= {keyword for layer in kept for keyword in layer.data.get("model") or {}}
        return kept

    def _run(self, name: str, layers: list[SettingLayer], *last: str) -> RunConfig | None:
        """The run of these layers and the overrides, with one more laid over those."""
        recipes = self._recipes
        target = RunTarget(name, layers, [])
        try:
            return merge_run(
                target, [*self._overrides, *last], signature_of=recipes.signature_of, task_of=recipes.task_of
            )
        except UserErrors as error:
            # each says where it was written, which for the base run is the same place for all cases
            self.mistakes += error.lines
            return None

    def _point(self, name: str, layers: list[SettingLayer], run: RunConfig, value: Any) -> RunConfig | None:
        """The run under one value of the sweep; None where its recipe has no such keyword."""
        if not self._file.sweep:
            return run
        setting = next(iter(self._file.sweep))
        section, _, key = setting.partition(".")
        if section not in ("model", "data") or (section == "data" and key not in SWEPT_DATA):
            known = ", ".join(f"data.{name}" for name in SWEPT_DATA)
            self.mistakes.append(f"sweep: '{setting}' cannot be changed after training; model.KEYWORD and {known} can")
            return None
        if section == "model" and key not in self._recipes.signature_of(run.recipe).parameters:
            return None
        return self._run(name, layers, f"{setting}={json.dumps(value)}")

    def _refuse_untrained(self, name: str, run: RunConfig, trained: str) -> None:
        """What takes over weights may differ from what was trained in the keywords of the model alone."""
        other = self._run(trained, self._layers(trained)[0])
        if other is None:
            return
        if run.model_copy(update={"model": {}, "out": None}) != other.model_copy(update={"model": {}, "out": None}):
            self.mistakes.append(
                f"case {name}: it takes the weights of {trained}, so nothing but its model may have other settings"
            )


def _unknown(layer: SettingLayer, known: Container[str] | None) -> list[str]:
    """The keywords of the layer's model that a recipe has not, where its keywords are known."""
    model = layer.data.get("model")
    return [] if known is None or not isinstance(model, dict) else [name for name in model if name not in known]


def find_comparison(target: str | Path) -> tuple[str, Path]:
    """The name and the file of a comparison. Raises UserError with the nearest."""
    shipped, path = shipped_comparisons(), Path(target)
    if str(target) in shipped:
        return str(target), shipped[str(target)]
    if path.is_file():
        return path.stem, path
    raise UserError(f"there is no comparison and no file '{target}'; {nearest(str(target), shipped)}")


def _mapping(layer: SettingLayer, key: str, mistakes: list[SettingError]) -> SettingLayer:
    """A part of the file that must be a mapping (for cases: of mappings), taken out of it."""
    given, spots = layer.data.pop(key, None), layer.below((key,))
    parts = {} if given is None else given
    if not isinstance(parts, dict):
        mistakes.append(SettingError(layer.spot((key,)), key, f"must be a mapping, not {show(parts)}"))
        return SettingLayer()
    for name, part in parts.items() if key == "cases" else ():
        if not isinstance(part, dict | None):
            what = f"must be a mapping of settings that differ from the run's, not {show(part)}"
            mistakes.append(SettingError(layer.spot((key, name)), f"{key}.{name}", what))
    return SettingLayer(parts, spots)


def _base(base: SettingLayer, path: Path, mistakes: list[SettingError]) -> list[SettingLayer]:
    """The layers below all cases: the base run and what it extends."""
    file = as_run_file(base, [])
    mistakes += file.mistakes
    if file.extends is None:
        return [file.layer]
    below, what = base_file(file.extends, path.parent)
    if below is None:
        mistakes.append(SettingError(file.layer.spot(("extends",)), "run.extends", what))
        return [file.layer]
    layers, wrong = chain(below)
    mistakes += wrong
    return [*layers, file.layer]


def _validated(layer: SettingLayer, mistakes: list[SettingError]) -> ComparisonFile | None:
    known = [*ComparisonFile.model_fields, "run", "cases"]
    try:
        return ComparisonFile.model_validate(layer.data)
    except ValidationError as error:
        for details in error.errors():
            path: Spots = tuple(part for part in details["loc"] if isinstance(part, str | int))
            what = sentence(details, path, known)
            if details["type"] == "missing":
                what = f"is missing: {ComparisonFile.model_fields[str(path[0])].description}"
            spot = (
                layer.locations.get(path) or layer.locations.get(path[:1]) or layer.locations.get((), SourceLocation())
            )
            mistakes.append(SettingError(spot, ".".join(map(str, path[:1])), " ".join(what.split())))
        return None
