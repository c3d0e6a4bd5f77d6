"""What the command lines do for scorers, evaluators, windows and data: read names and options, run the contracts."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from manyformer.analysis.contracts.check_report import CheckReport, ContractRow
from manyformer.analysis.contracts.data_check import DATA_CONTRACTS, check_data
from manyformer.analysis.contracts.evaluators import EVALUATOR_CONTRACTS, check_evaluator_report
from manyformer.analysis.contracts.importing import import_file, import_module, printing_to_stderr, run_user_code
from manyformer.analysis.contracts.loading import HOW_TO_NAME, split_name
from manyformer.analysis.contracts.scorers import SCORER_CONTRACTS, check_scorer, scorer_of_model
from manyformer.base.errors import UserError, suggest_names

if TYPE_CHECKING:
    from manyformer.analysis.contracts.command import CheckRequest

OnRow = Callable[[ContractRow], None]


def check_named_scorer(words: Sequence[str], request: "CheckRequest", on_row: OnRow | None = None) -> CheckReport:
    """Check the scorer or the evaluator that the options name. Raises UserError."""
    if words:
        raise UserError(f"'{words[0]}' stands beside --scorer or --evaluator, which takes the place of a model")
    if request.scorer and request.evaluator:
        raise UserError("give either --scorer or --evaluator")
    if request.vocab is None:
        raise UserError("a scorer does not say how many tokens there are: give --vocab N")
    bytes_of = _optional_function(request.bytes_of)
    with printing_to_stderr():
        if request.evaluator:
            report = check_evaluator_report(
                load_function(request.evaluator),
                request.vocab,
                length=request.length,
                bytes_of=bytes_of,
                seed=request.seed,
                only=_chosen(request, EVALUATOR_CONTRACTS),
                on_row=on_row,
            )
            return replace(report, subject=request.evaluator)
        assert request.scorer is not None
        report = check_scorer(
            load_function(request.scorer),
            request.vocab,
            length=request.length,
            block=request.block,
            bytes_of=bytes_of,
            decode=_optional_function(request.decode),
            encode=_optional_function(request.encode),
            bos=request.bos,
            partitions=[read_keywords_of_scorer(text) for text in request.partition or ()],
            seconds=request.seconds,
            seed=request.seed,
            only=_chosen(request, SCORER_CONTRACTS),
            on_row=on_row,
        )
    return replace(report, subject=request.scorer)


def check_named_windows(model: Any, name: str, request: "CheckRequest") -> CheckReport:
    """Check the scores that a model gives by windows. Raises UserError."""
    if request.window is None:
        raise UserError(f"--stride {request.stride} is of a window: give --window N")
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} is no nn.Module: write a scorer, and give --scorer FILE.py:NAME")
    stride = request.stride or request.window
    score, vocab = scorer_of_model(model.eval(), request.window, stride)
    report = check_scorer(
        score,
        request.vocab or vocab,
        block=stride,
        length=request.length or 2 * request.window + request.window // 3 + 2,
        bos=request.bos,
        seconds=request.seconds,
        seed=request.seed,
        only=_chosen(request, SCORER_CONTRACTS),
    )
    return replace(report, subject=f"{name} by windows of {request.window}, {stride} new in each,")


def check_named_data(words: Sequence[str], request: "CheckRequest", on_row: OnRow | None = None) -> CheckReport:
    """Check the data of train=PATH and test=PATH, each of which may be given several times. Raises UserError."""
    paths: dict[str, list[str]] = {"train": [], "test": []}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or name not in paths or not path:
            raise UserError(f"'{word}' is neither train=PATH nor test=PATH")
        paths[name].append(path)
    if not paths["train"]:
        raise UserError("name training data: --data train=PATH, and test=PATH for what is tested on")
    return check_data(paths["train"], paths["test"] or None, only=_chosen(request, DATA_CONTRACTS), on_row=on_row)


def _chosen(request: "CheckRequest", names: Sequence[str] | dict[str, Any]) -> list[str] | None:
    """The contracts of --only without those of --skip. Raises UserError for unknown ones."""
    from manyformer.analysis.contracts.command import split_names

    only = split_names(request.only)
    skip = split_names(request.skip)
    for name in (*only, *skip):
        if name not in names:
            raise UserError(f"there is no contract '{name}' here; {suggest_names(name, names)}")
    if not only and not skip:
        return None
    return [name for name in only or names if name not in skip]


def _optional_function(name: str | None) -> Callable[..., Any] | None:
    return None if name is None else load_function(name)


def load_function(name: str) -> Callable[..., Any]:
    """The function that FILE.py:NAME or MODULE:NAME names, or an object of the class of that name that can be called.

    Raises UserError.
    """
    source, attribute = split_name(name)
    if attribute is None:
        raise UserError(f"'{name}' names no function; {HOW_TO_NAME.replace('model.py:GPT', 'score.py:score')}")
    path = Path(source)
    if path.suffix == ".py":
        if not path.is_file():
            raise UserError(f"there is no file {source}")
        module = import_file(path).module
    else:
        module = import_module(source).module
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if inspect.isclass(value):
        made = value
        root = Path(sys.modules[made.__module__].__file__ or ".").parent
        value = run_user_code(lambda: made(), f"building {attribute}", root)
    if not callable(value):
        functions = [key for key, each in vars(module).items() if inspect.isfunction(each) and not key.startswith("_")]
        what = f"there is no function '{attribute}' in {source}"
        raise UserError(f"{what}; {suggest_names(attribute, functions)}" if functions else f"{what}, which has none")
    function: Callable[..., Any] = value
    return function


def read_keywords_of_scorer(text: str) -> dict[str, Any]:
    """Keywords such as rows=4,shuffle=true. Raises UserError."""
    keywords: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"'{part}' is no KEY=VALUE, such as rows=4")
        try:
            keywords[name.strip()] = int(value)
        except ValueError:
            keywords[name.strip()] = {"true": True, "false": False}.get(value.strip().lower(), value)
    return keywords
