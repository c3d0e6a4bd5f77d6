"""Load a comparison from its file: the base run, the cases over it, and the settings besides."""

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from manyformer.config.comparison import Comparison, ComparisonCase, ComparisonFile
from manyformer.config.comparison_cases import CaseReader
from manyformer.config.load import RecipeLookup, extends_chain, find_base_file, import_named
from manyformer.config.run_file import read_mapping, split_extends
from manyformer.config.section import ConfigSection
from manyformer.config.setting_layers import SettingError, SettingLayer, stack
from manyformer.config.shipped import run_description, shipped_comparisons
from manyformer.config.validation_errors import error_text
from manyformer.errors import UserError, UserErrors, format_value, suggest_names
from manyformer.files.file_kinds import special_kind

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
    name, about, file, layer, base_layers, mappings = read_parts(
        target, ComparisonFile, ("cases",), "a comparison has a base run and cases", recipes
    )
    return Comparison(name, about, file, read_cases(base_layers, mappings["cases"], file, layer, overrides, recipes))


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
    for name, part in parts.items() if nested else ():
        if not isinstance(part, dict | None):
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
    kind: type[ValidatedSection], layer: SettingLayer, others: Sequence[str], errors: list[SettingError]
) -> ValidatedSection | None:
    """The layer as a section, None with the errors collected; `others` are names that were taken from it before."""
    valid_names = [*kind.model_fields, *others]
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
