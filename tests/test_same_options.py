"""An option of a command and the keyword of the function behind it have the same name, meaning and default."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_type_hints

import pytest

from manyformer.cli.bench import _read_lengths
from manyformer.inference.decoding_options import DecodingOptions
from manyformer.inference.generate import BeamSettings, GNMTPenalty, decoding_from_options
from test_documentation import COMMANDS


class Pair(NamedTuple):
    """A command and the function that does the same; `names` are options that the function calls otherwise."""

    command: str
    function: str
    names: Mapping[str, str] = {}


DECODING = "inference.generate.decoding_from_options"
PAIRS = (
    Pair("train", "training.train"),
    Pair("generate", DECODING),
    Pair("translate", "inference.generate.decoding.BeamSettings", {"beam": "width"}),
    Pair("caption", "inference.generate.decoding.BeamSettings", {"beam": "width"}),
    Pair("transcribe", "inference.evaluate.predict.transcribe_files"),
    Pair("predict", "inference.evaluate.predict"),
    Pair("evaluate", "inference.evaluate.evaluate.evaluate"),
    Pair("evaluate", "inference.evaluate.EvaluationSettings"),
    Pair("check", "analysis.own_models.check", {"vocab": "vocabulary"}),
    Pair("compare", "analysis.comparisons.compare"),
    Pair("advise", "analysis.comparisons.advise.advise"),
    Pair("bench", "analysis.benchmarks.bench", {"kinds": "what"}),
    Pair("plan", "analysis.planning.PlanRequest", {"mfu": "utilization"}),
    Pair("convert", "conversion.surgery.convert"),
    Pair("prune", "analysis.pruning.prune_run"),
    Pair("import", "conversion.hugging_face.import_model"),
    Pair("export", "conversion.hugging_face.export_model"),
    # `documents` of the function are those of given prompts, not their number
    Pair("calibrate", "inference.early_exit.calibrate", {"documents": ""}),
    Pair("calibrate", "inference.early_exit.load_calibration_prompts", {"documents": "count", "batch": "rows"}),
    Pair("calibrate", "inference.early_exit.load_prompts", {"prompts": "count", "batch": "rows"}),
    Pair("calibrate", "inference.early_exit.sweep"),
    Pair("floors", "data.generated.synthetic_floors.measure_floors"),
    Pair("view", "analysis.viewer.view"),
    Pair("datastore build", "inference.datastore.datastore_job"),
    Pair("datastore neighbours", "inference.datastore.find_neighbours"),
    Pair("datastore evaluate", "inference.datastore.Datastore"),
    Pair("datastore look", "inference.datastore.knn_lm"),
    Pair("datastore look", "inference.datastore.inspect_prompt.inspect_prompt", {"shown": "num_neighbours"}),
)

IN_WORDS: Mapping[Any, Callable[[str], Any]] = {
    ("bench", "lengths"): lambda words: tuple(_read_lengths(words)),
    ("bench", "kinds"): lambda words: tuple(words.split(",")),
    ("plan", "length"): int,
}
"""Defaults that the command line writes as text, with what reads them."""


def function_defaults(path: str) -> dict[str, Any]:
    """The keywords of a function or the fields of a record that have a default."""
    module, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(f"manyformer.{module}"), name)
    if path == DECODING:
        return dict.fromkeys(get_type_hints(DecodingOptions))
    if dataclasses.is_dataclass(function):
        fields = {field.name: field.default for field in dataclasses.fields(function)}
        return {name: value for name, value in fields.items() if value is not dataclasses.MISSING}
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def shared_options(pair: Pair) -> dict[str, tuple[Any, Any]]:
    """Of each option that both have the default of the command and that of the function."""
    defaults = function_defaults(pair.function)
    options = {option.name: option.default for option in COMMANDS[tuple(pair.command.split())].params}
    names = {option: pair.names.get(option, option) for option in options}
    return {option: (options[option], defaults[name]) for option, name in names.items() if name in defaults}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.command} - {pair.function}")
def test_a_command_and_its_function_have_the_same_defaults(pair: Pair) -> None:
    shared = shared_options(pair)
    assert shared
    for option, (on_command_line, in_python) in shared.items():
        read = IN_WORDS.get((pair.command, option))
        if read is not None:
            assert read(on_command_line) == in_python, option
        elif on_command_line in (None, False):
            # an option that was not given, several of which are an empty list
            assert in_python in (None, False, ()), option
        else:
            assert on_command_line == in_python, option


@pytest.mark.parametrize("command", ["translate", "caption", "evaluate"])
def test_beams_of_commands_have_the_length_penalty_of_beams_in_python(command: str) -> None:
    options = {option.name: option.default for option in COMMANDS[(command,)].params}
    assert BeamSettings(options["beam"]).penalty == GNMTPenalty(options["length_penalty"])
    assert decoding_from_options(beam=options["beam"]).choice == BeamSettings()
