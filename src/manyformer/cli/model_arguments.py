"""What a command line names: a recipe, or a folder of a run or a saved model, its keywords and device, and prompts.

Prompts come from the command line, a pipe, a file or a terminal."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyformer.base.errors import UserError, UserErrors, suggest_names
from manyformer.base.files.verified_folder import MANIFEST
from manyformer.cli.console import print_note
from manyformer.config.published_sizes import published_size

if TYPE_CHECKING:
    from manyformer.inference.generate import Decoding, Translator
    from manyformer.models import Model
    from manyformer.recipes import Recipe


def is_folder(name: str) -> bool:
    """Whether a name refers to a folder rather than a recipe: it exists, or contains a slash."""
    return Path(name).is_dir() or ("/" in name and published_size(name) is None)


def model_of(name: str, arguments: list[str] | None) -> "tuple[Recipe, dict[str, Any]]":
    """The recipe that `name` refers to and its keywords: a saved model's, updated by `arguments` (KEY=VALUE)."""
    keywords: dict[str, Any] = {}
    if is_folder(name):
        from manyformer.conversion.hugging_face.model_import import read_recipe

        recipe, keywords = read_recipe(model_folder(name))
    else:
        from manyformer.recipes import get_recipe

        recipe = get_recipe(name)
    return recipe, {**keywords, **read_keywords(recipe, arguments)}


def changed_keywords(name: str, arguments: list[str] | None) -> "dict[str, Any]":
    """The keywords in `arguments` (KEY=VALUE) for the recipe of the model in the folder `name`."""
    from manyformer.conversion.hugging_face.model_import import read_recipe

    recipe, _ = read_recipe(model_folder(name))
    return read_keywords(recipe, arguments)


def model_folder(name: str) -> Path:
    """The folder of the model in `name`, directly or as a run. Raises UserError with the nearest existing runs."""
    folder = Path(name)
    if not name:
        raise UserError(f"the name of the run is empty; {_nearest_runs(name)}")
    if not folder.is_dir():
        raise UserError(f"there is no folder {name}; {_nearest_runs(name)}")
    for candidate in (folder, folder / "model"):
        # either file: the other one may be missing, which reading the model reports
        if (candidate / "config.json").exists() or (candidate == folder / "model" and (candidate / MANIFEST).exists()):
            return candidate
    if (folder / "checkpoints").is_dir():
        raise UserError(f"the run {name} has no final model yet: repeat its train command to continue it")
    raise UserError(f"{name} holds neither a model (config.json) nor a run; {_nearest_runs(name)}")


def check_new_folder(name: str) -> None:
    """Raise UserError if the folder of a new model exists already."""
    if Path(name).exists():
        raise UserError(f"{name} exists already; choose another --out")


def _nearest_runs(name: str) -> str:
    runs = sorted(str(path.parent.parent) for path in Path("runs").rglob("model/config.json"))
    if runs:
        return suggest_names(name, runs)
    return "no run in ./runs has a model: train one with `manyformer train`"


def read_keywords(recipe: "Recipe", arguments: list[str] | None) -> dict[str, Any]:
    """KEY=VALUE, --key=value or --key value as keywords of `recipe`. Raises UserErrors with all errors together."""
    if not arguments:
        return {}
    from manyformer.config.overrides import parse_overrides
    from manyformer.config.setting_layers import SettingError
    from manyformer.config.validation_errors import check_keyword

    overrides, mistakes = parse_overrides(arguments or [])
    valid_names = [f"model.{name}" for name in recipe.signature.parameters]
    keywords: dict[str, Any] = {}
    for override in overrides:
        name = override.key.removeprefix("model.")
        keywords[name], reason = check_keyword(name, override.value, recipe.signature, valid_names)
        if reason:
            # collected, so that all mistakes of a command line are reported at once
            mistakes.append(SettingError(override.location, override.key, reason))
    if mistakes:
        raise UserErrors(map(str, mistakes))
    return keywords


def resolve_device(device: str | None) -> str:
    """The requested device, by default a GPU if there is one. Raises UserError for a device that is not available."""
    from manyformer.nn.runtime.devices import available_devices

    devices = available_devices()
    if device is None:
        return devices[0]
    # "cuda:1" is one of the devices "cuda"
    if device.partition(":")[0] not in devices:
        raise UserError(f"--device {device} is not available; available: {', '.join(devices)}")
    return device


def data_paths(data: list[str] | None) -> str | list[str] | None:
    """The value of --data: None, one path, or a list of paths."""
    if not data:
        return None
    if len(data) == 1:
        return data[0]
    return data


def load_model(name: str, device: str | None) -> "Model":
    """The trained model in the folder `name`, on the requested device."""
    from manyformer.conversion import load

    return load(model_folder(name)).to(resolve_device(device))


def load_generator(name: str, device: str | None = None) -> "Model":
    """The generative model in the folder `name`. Raises UserError for other models and for one without a tokenizer."""
    from manyformer.recipes.parts.registry import task_of

    model = load_model(name, device)
    task = task_of(model)
    if task.generates in (None, "text"):
        description = f"the model in {name} ({model.spec.recipe}) does not generate text from a text, or images"
        raise UserError(f"{description}; `manyformer {task.command}` is for models of {task.title}")
    if model.tokenizer is None:
        raise UserError(f"the model in {name} was saved without a tokenizer, which text needs")
    return model


def use_calibrated_exits(model: "Model", calibration: Path | None, decoding: "Decoding") -> None:
    """Let tokens exit as the file `calibration` says; None changes nothing. Raises UserError where it does not hold."""
    if calibration is not None:
        # imported here because few models have exits
        from manyformer.inference.early_exit import use_calibration

        use_calibration(model, calibration, decoding)


def load_translator(
    name: str, decoding: "Decoding", device: str | None = None, calibration: Path | None = None
) -> "Translator":
    """A translator with the encoder-decoder in the folder `name`. Raises UserError for any other model."""
    from manyformer.inference.generate import Translator
    from manyformer.inference.generate.protocol import TranslatesText

    model = load_generator(name, device)
    if not isinstance(model, TranslatesText):
        raise UserError(f"the model in {name} is a language model; `manyformer generate` continues texts")
    use_calibrated_exits(model, calibration, decoding)
    return Translator(model, tokenizer=model.tokenizer, decoding=decoding)


MAX_PROMPT_BYTES = 1 << 26
"""The largest text from standard input, or all lines of it, that is taken for prompts."""


def read_prompts(prompt: str | None, *, lines: bool) -> list[str]:
    """The prompts of `generate`: the one on the command line, or standard input as a whole or line by line.

    Without either: one empty prompt. Lines end as those of files do; empty ones are no prompts, and a note says how
    many there were. Raises UserError for `lines` without standard input and for bytes that are not UTF-8.
    """
    from manyformer.data.text.text_files import split_lines, without_line_end

    # a command in a script without a prompt has a pipe or a file for its input, not a person
    is_piped = prompt == "-" or (prompt is None and not sys.stdin.isatty())
    if lines and not is_piped:
        raise UserError("--lines reads prompts from standard input: pipe them in, or give '-' as the prompt")
    if not is_piped:
        return ["" if prompt is None else prompt]
    text = read_text()
    if not lines:
        return [without_line_end(text)]
    all_lines = split_lines(text)
    prompts = [line for line in all_lines if line]
    if not prompts:
        raise UserError("standard input has no non-empty line")
    if len(prompts) < len(all_lines):
        empty = len(all_lines) - len(prompts)
        first = all_lines.index("") + 1
        print_note(f"{empty:,} empty line{'s' * (empty > 1)} of standard input (first: line {first:,}) left out")
    return prompts


def read_argument(text: str) -> str:
    """A text on the command line, or all of standard input for "-". Raises UserError for bytes that are not UTF-8."""
    from manyformer.data.text.text_files import without_line_end

    if text == "-":
        return without_line_end(read_text())
    return text


def read_text() -> str:
    """All of standard input as text. Raises UserError for more than `MAX_PROMPT_BYTES`."""
    from manyformer.data.text.text_files import decode_text

    # one byte more than allowed shows that there are too many without reading them all
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise UserError(f"standard input has more than {MAX_PROMPT_BYTES:,} bytes, which is too much for prompts")
    return decode_text(data, "standard input", "FILE")


def read_lines(name: str) -> Iterator[str]:
    """The lines of a file, or of standard input where the name is '-', one at a time. Raises UserError without any."""
    from manyformer.data.pipeline.data_paths import stdin_lines
    from manyformer.data.text import text_files

    if name == "-":
        yield from stdin_lines()
        return
    lines = text_files.read_lines(text_files.existing_path(name))
    # read before any output, so that an empty file is an error and not an empty result
    first = next(lines, None)
    if first is None:
        raise UserError(f"{name}: there is no line in it")
    yield first.text
    yield from (line.text for line in lines)


def typed_lines(prompt: str) -> Iterator[str]:
    """Lines typed at a terminal, until the end of input (Ctrl-D)."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            # the prompt of the terminal stays on its line after Ctrl-D
            print(file=sys.stderr)
            return
