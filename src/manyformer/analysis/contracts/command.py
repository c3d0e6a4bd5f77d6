"""What `manyformer check` and the small program `manyformer-check` do: their options, texts, output and exit codes."""

import argparse
import dataclasses
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyformer.base.errors import UserError
from manyformer.base.files.text_tables import printable

if TYPE_CHECKING:
    from manyformer.analysis.contracts.check_report import CheckReport, ContractRow
    from manyformer.analysis.contracts.loading import LoadedModel

HONEST = 0
NOT_HONEST = 1
NOT_TRIED = 2
"""The exit codes: no contract failed, one did, or the model could not be tried."""
STOPPED = 130

PROGRAM = "manyformer-check"

DESCRIPTION = (
    "Is my model honest? Finds outputs that depend on later tokens, caches that decode otherwise, rows of a batch that "
    "change each other, and more, in any PyTorch model, without training it."
)

NAME_HELP = (
    "FILE.py:NAME or MODULE:NAME, where NAME is a module, a class, or a function that gives a module, "
    "(module, options) or an Adapter; the folder of a Hugging Face model; a file of TorchScript or torch.export."
)

CODE_WARNING = "Importing a file runs its code, and so does a file of TorchScript; nothing is unpickled."

VALUES_HELP = (
    "Sizes of a class are filled with small ones by the names of its parameters; KEY=VALUE after a name gives or "
    "changes one."
)

OTHERWISE = "to say otherwise: "
HOW_TO_SAY = f"{OTHERWISE}--vocab, --max-length, --not-causal, or name a function that gives an Adapter"

EXIT_CODES = "Ends with exit code 0 if all contracts hold, 1 if one fails, 2 if a model could not be tried."

EXAMPLES = (
    "model.py:GPT",
    "model.py:GPT n_layer=2 n_head=4 --only causal,cached",
    "mypackage.model:build --length 128 --json",
)


def _option(help_text: str, default: Any = None, *, flag: str | None = None, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "flag": flag, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """How to check; the fields are the options of both command lines, with their texts."""

    length: int | None = _option(
        "Tokens in each sequence; by default 48, or 64 for a model of a file, and more in tests of causality."
    )
    only: str | None = _option("Only these contracts, separated by commas.")
    skip: str | None = _option("All but these contracts, separated by commas.")
    seed: int = _option("Seed of weights and inputs.", 0)
    vocab: int | None = _option("Size of the vocabulary, if it is not to be found by trial.")
    max_length: int | None = _option("The most tokens that the model takes, if they are not to be found by trial.")
    not_causal: bool = _option("The model is an encoder: outputs may depend on later tokens.", default=False)
    window: int | None = _option("Check the scores that the model gives by windows of so many tokens.")
    stride: int | None = _option("New tokens in each window; by default the whole window.")
    scorer: str | None = _option(
        "Check a function instead that gives the nats of the tokens of a stream.", metavar="FILE.py:NAME"
    )
    evaluator: str | None = _option(
        "Check a function instead that gives one number for (model, tokens).", metavar="FILE.py:NAME"
    )
    block: int | None = _option("The size at which the scorer cuts a stream: its window, stride or chunk.")
    bytes_of: str | None = _option("A function that gives the bytes of each token.", metavar="FILE.py:NAME")
    decode: str | None = _option("A function that gives the text or bytes of tokens.", metavar="FILE.py:NAME")
    encode: str | None = _option("A function that gives the tokens of a text.", metavar="FILE.py:NAME")
    bos: int | None = _option("The token that begins a document, if the scorer promises independent documents.")
    partition: list[str] | None = _option(  # noqa: RUF009 - a field like the others
        "Keywords of the scorer that must not change a score; may be given several times.", metavar="KEY=VALUE,..."
    )
    seconds: int = _option("About how long the check of a scorer may take.", 120)
    data: bool = _option("Check data instead: train=PATH and test=PATH, files or folders.", default=False)
    as_json: bool = _option("Print the result as JSON.", default=False, flag="--json")

    @property
    def check_options(self) -> dict[str, Any]:
        """The keywords of `check` that were given."""
        options: dict[str, Any] = {"vocabulary": self.vocab, "max_length": self.max_length}
        if self.not_causal:
            options["causal"] = False
        return {name: value for name, value in options.items() if value is not None}


def option_flag(item: dataclasses.Field[Any]) -> str:
    """How the option of a field is written."""
    return item.metadata["flag"] or "--" + item.name.replace("_", "-")


def split_names(text: str | None) -> list[str]:
    """The names in a text that commas separate; none without a text."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


@dataclass(frozen=True)
class NamedModel:
    """The name of a model on the command line, and the values that follow it."""

    name: str
    values: list[str]


def group_words(words: Sequence[str]) -> list[NamedModel]:
    """The models that a command line names, each with the KEY=VALUE, --key=value and --key value behind it."""
    named: list[NamedModel] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        is_value = word.startswith("--") or ("=" in word and not Path(word).exists())
        if not is_value:
            named.append(NamedModel(word, []))
            continue
        if not named:
            raise UserError(f"'{word}' comes before the name of a model, whose value it is: NAME {word}")
        named[-1].values.append(word)
        # its value is the next argument, unless that is an option itself
        if word.startswith("--") and "=" not in word and remaining and not remaining[0].startswith("--"):
            named[-1].values.append(remaining.pop(0))
    if not named:
        raise UserError(f"name a model: {NAME_HELP[0].lower()}{NAME_HELP[1:]}")
    return named


def read_values(values: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE, --key=value or --key value as a dictionary. Raises UserError."""
    given: dict[str, str] = {}
    remaining = list(values)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not remaining:
                raise UserError(f"{word} has no value; give {word}=VALUE")
            value = remaining.pop(0)
        given[name.replace("-", "_")] = value
    return given


Status = Callable[[str], AbstractContextManager[Callable[[str], None]]]


@contextmanager
def progress_line(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr while the block runs, if it is a terminal; yields a function that changes it."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def show(line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{printable(line)[:width]}", end="", file=sys.stderr, flush=True)

    show(text)
    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def load_stranger(name: str, values: Sequence[str], request: CheckRequest) -> "LoadedModel":
    """The model of a name that is no recipe. Raises UserError."""
    from manyformer.analysis.contracts.loading import load_named
    from manyformer.analysis.contracts.subject import seed_everything

    seed_everything(request.seed)
    return load_named(name, read_values(values))


def print_error(text: str) -> None:
    """Print an error to stderr; lines that begin with a space belong to the one before."""
    for line in printable(text).split("\n"):
        mark = "" if line.startswith(" ") else "error: "
        print(f"{mark}{line}", file=sys.stderr)


def print_report(report: "CheckReport") -> None:
    """Print a report: to a terminal in its width, else one line for each contract."""
    if sys.stdout.isatty():
        width = min(shutil.get_terminal_size().columns, 120)
        print(wrapped_report(report, width, colored="NO_COLOR" not in os.environ))
    else:
        print(printable(report.table()))


@dataclass(frozen=True)
class CommandFace:
    """How one of the two programs finds models and shows what happens."""

    load: Callable[[str, Sequence[str], CheckRequest], "LoadedModel"] = load_stranger
    status: Status = progress_line
    show: Callable[["CheckReport"], None] = print_report
    show_error: Callable[[str], None] = print_error


def run_checks(words: Sequence[str], request: CheckRequest, face: CommandFace) -> int:
    """Check the models that `words` name, print their reports and give the exit code. Raises UserError.

    Of several models, one that cannot be loaded is told, and the others are checked.
    """
    if request.scorer or request.evaluator or request.data:
        return _check_no_model(words, request, face)
    named = group_words(words)
    reports: list[CheckReport] = []
    codes: list[int] = []
    for model in named:
        try:
            report, code = _check_one(model, request, face)
        except UserError as error:
            if len(named) == 1:
                raise
            face.show_error(f"{model.name}: {error}")
            codes.append(NOT_TRIED)
            continue
        reports.append(report)
        codes.append(code)
        if not request.as_json:
            face.show(report)
    if request.as_json:
        texts = [report.to_json() for report in reports]
        # of several models a list, also if but one of them could be checked
        print(texts[0] if len(named) == 1 else "[" + ",\n".join(texts) + "]")
    # what is certain comes first: a fault that was found is no doubt
    for code in (NOT_HONEST, NOT_TRIED):
        if code in codes:
            return code
    return HONEST


def _check_no_model(words: Sequence[str], request: CheckRequest, face: CommandFace) -> int:
    """Check a scorer, an evaluator or data."""
    from manyformer.analysis.contracts.scorer_command import check_named_data, check_named_scorer

    name = request.scorer or request.evaluator or " ".join(words)
    with face.status(f"checking {name}") as status:

        def tell(row: "ContractRow") -> None:
            status(f"checking {name}: {row.contract} {row.verdict}")

        if request.data:
            report = check_named_data(words, request, tell)
        else:
            report = check_named_scorer(words, request, tell)
    if request.as_json:
        print(report.to_json())
    else:
        face.show(report)
    return exit_code(report)


def _check_one(model: NamedModel, request: CheckRequest, face: CommandFace) -> "tuple[CheckReport, int]":
    from manyformer.analysis.contracts.check import check
    from manyformer.analysis.contracts.importing import printing_to_stderr
    from manyformer.analysis.contracts.scorer_command import check_named_windows
    from manyformer.analysis.contracts.subject import Subject

    with face.status(f"loading {model.name}") as status, printing_to_stderr():
        loaded = face.load(model.name, model.values, request)
        if request.window is not None or request.stride is not None:
            report = check_named_windows(loaded.model, model.name, request)
            return report, exit_code(report)
        options = {**loaded.options, **request.check_options}
        report = check(
            loaded.model,
            length=request.length,
            seed=request.seed,
            only=None if request.only is None else split_names(request.only),
            skip=split_names(request.skip),
            on_row=lambda row: status(f"checking {model.name}: {row.contract} {row.verdict}"),
            **options,
        )
    promises_itself = isinstance(loaded.model, Subject)
    if not promises_itself:
        # the report names keywords of Python
        found = [HOW_TO_SAY if line.startswith(OTHERWISE) else line for line in report.assumptions]
        report = dataclasses.replace(report, subject=model.name, assumptions=(*loaded.notes, *found))
    return report, exit_code(report, promises_itself=promises_itself)


def exit_code(report: "CheckReport", *, promises_itself: bool = False) -> int:
    """The exit code for a report: nothing is shown to be honest by contracts of which none could be run.

    With `promises_itself`, the model says itself that it does not promise a contract, which is an answer.
    """
    verdicts = {row.verdict for row in report.rows}
    if "failed" in verdicts:
        return NOT_HONEST
    if "passed" in verdicts or (promises_itself and "not run" not in verdicts):
        return HONEST
    return NOT_TRIED


COLORS = {"passed": "32", "failed": "1;31", "not run": "33"}


def wrapped_report(report: "CheckReport", width: int, *, colored: bool = False) -> str:
    """The report for a terminal of so many columns; contracts that are not promised for one reason share a line."""
    lines = textwrap.wrap(printable(report.heading), width)
    for assumption in report.assumptions:
        lines += textwrap.wrap(printable(assumption), width, initial_indent="  ", subsequent_indent="    ")
    lines.append("")
    not_promised: dict[str, list[str]] = {}
    names = max((len(row.contract) for row in report.rows), default=0)
    for row in report.rows:
        if row.verdict == "not promised":
            not_promised.setdefault(row.sentence, []).append(row.contract)
            continue
        begin = f"{row.contract:<{names}}  {row.verdict:<7}  "
        wrapped = textwrap.wrap(printable(row.sentence), max(20, width - len(begin)), break_on_hyphens=False) or [""]
        first = begin + wrapped[0]
        if colored:
            color = f"\x1b[{COLORS[row.verdict]}m{row.verdict:<7}\x1b[0m"
            first = f"{row.contract:<{names}}  {color}  {wrapped[0]}"
        lines.append(first)
        lines += [" " * len(begin) + line for line in wrapped[1:]]
    for sentence, contracts in not_promised.items():
        text = f"{', '.join(contracts)}: {sentence}"
        lines += textwrap.wrap(printable(text), width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([*lines, "", *textwrap.wrap(printable(report.summary()), width)])


def make_parser() -> argparse.ArgumentParser:
    """The parser of `manyformer-check`, from the fields of `CheckRequest`."""
    examples = "\n".join(f"  {PROGRAM} {words}" for words in EXAMPLES)
    notes = "\n\n".join(textwrap.fill(text, 78) for text in (VALUES_HELP, CODE_WARNING, EXIT_CODES))
    parser = argparse.ArgumentParser(
        PROGRAM,
        description=DESCRIPTION,
        epilog=f"examples:\n{examples}\n\n{notes}",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="NAME [KEY=VALUE]", help=NAME_HELP)
    for item in fields(CheckRequest):
        help_text = item.metadata["help"].replace("%", "%%")
        flag = option_flag(item)
        if item.default is False:
            parser.add_argument(flag, dest=item.name, action="store_true", help=help_text)
            continue
        if item.type == list[str] | None:
            parser.add_argument(flag, dest=item.name, action="append", metavar=item.metadata["metavar"], help=help_text)
            continue
        kind = int if item.type in (int, int | None) else str
        metavar = item.metadata["metavar"] or ("N" if kind is int else "NAMES")
        parser.add_argument(flag, dest=item.name, type=kind, default=item.default, metavar=metavar, help=help_text)
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    return parser


def read_request(options: Mapping[str, Any]) -> CheckRequest:
    """How to check, from what the parser has read."""
    return CheckRequest(**{item.name: options[item.name] for item in fields(CheckRequest)})


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description, but not the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the small program `manyformer-check` and return its exit code."""
    parser = make_parser()
    options: Mapping[str, Any] = vars(parser.parse_intermixed_args(arguments))
    if not (options["names"] or options["scorer"] or options["evaluator"] or options["data"]):
        parser.print_help()
        return HONEST
    request = read_request(options)
    try:
        return run_checks(options["names"], request, CommandFace())
    except UserError as error:
        if options["debug"]:
            traceback.print_exc()
        print_error(str(error))
        return NOT_TRIED
    except KeyboardInterrupt:
        # on a new line, because a line of output may be incomplete
        print("\nstopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        # the reader closed the pipe (`| head`); Python's own flush at exit must not fail on it either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return HONEST


if __name__ == "__main__":
    raise SystemExit(main())
