"""What `manyformer check` and the small program `manyformer-check` do: their options, texts, output and exit codes."""

import argparse
import dataclasses
import os
import shlex
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
    "model.py:GPT --window 256 --stride 64",
    "--scorer evaluate.py:score --vocab 1024 --block 256",
    "--data train=train.txt test=test.txt",
)

MODEL = "a model"
WINDOWS = "--window"
SCORER = "--scorer"
EVALUATOR = "--evaluator"
DATA = "--data"
"""What is checked: a model, its scores by windows, a scorer, an evaluator of one number, or data."""


def _option(
    help_text: str,
    default: Any = None,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    uses: tuple[str, ...] = (),
) -> Any:
    """A field with the text of its option; one with `uses` is for these kinds of checks alone."""
    return field(default=default, metadata={"help": help_text, "flag": flag, "metavar": metavar, "uses": uses})


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """How to check; the fields are the options of both command lines, with their texts."""

    length: int | None = _option(
        "Tokens in each sequence; by default 48, or 64 for a model of a file, and more in tests of causality."
    )
    only: str | None = _option("Only these contracts, separated by commas.")
    skip: str | None = _option("All but these contracts, separated by commas.", uses=(MODEL,))
    seed: int = _option("Seed of weights and inputs.", 0)
    vocab: int | None = _option(
        "Size of the vocabulary, if it is not to be found by trial; of a scorer it must be given."
    )
    max_length: int | None = _option(
        "The most tokens that the model takes, if they are not to be found by trial.", uses=(MODEL,)
    )
    not_causal: bool = _option(
        "The model is an encoder: outputs may depend on later tokens.", default=False, uses=(MODEL,)
    )
    window: int | None = _option("Check the scores that a model gives by windows of so many tokens.", uses=(WINDOWS,))
    stride: int | None = _option("Tokens from a window to the next one; a whole window unless given.", uses=(WINDOWS,))
    scorer: str | None = _option(
        "Check a function score(tokens) that gives the nats of tokens 1 to n - 1.",
        metavar="FILE.py:NAME",
        uses=(SCORER,),
    )
    evaluator: str | None = _option(
        "Check a function that gives one number for a model and tokens.", metavar="FILE.py:NAME", uses=(EVALUATOR,)
    )
    block: int | None = _option("The scorer's window, stride or chunk: leaks are at its borders.", uses=(SCORER,))
    bytes_of: str | None = _option(
        "The function that counts the bytes of tokens.", metavar="FILE.py:NAME", uses=(SCORER, EVALUATOR)
    )
    decode: str | None = _option("The function from tokens to text.", metavar="FILE.py:NAME", uses=(SCORER,))
    encode: str | None = _option("The function from text to tokens.", metavar="FILE.py:NAME", uses=(SCORER,))
    bos: int | None = _option(
        "The token that begins a document, if documents are promised to be independent.", uses=(SCORER,)
    )
    partition: str | None = _option(
        "Keywords of the scorer that must not change a score, such as rows=1,rows=4.",
        metavar="KEY=VALUE,...",
        uses=(SCORER,),
    )
    seconds: int = _option("About how long the check of scores may take.", 120, uses=(SCORER, WINDOWS))
    data: bool = _option(
        "Check data: train=PATH and test=PATH, each a file or folder, are given in place of names.",
        default=False,
        uses=(DATA,),
    )
    html: str | None = _option("Also write the report as one page, to attach to a pull request.", metavar="FILE")
    badge: str | None = _option(
        "Also write a badge: a picture (.svg), or JSON for the endpoint of shields.io (.json).", metavar="FILE"
    )
    as_json: bool = _option("Print the result as JSON.", default=False, flag="--json")

    def command_line(self, words: Sequence[str]) -> str:
        """The arguments that repeat the check, without those that say how it is shown."""
        arguments = [*words]
        for item in fields(self):
            value = getattr(self, item.name)
            if value == item.default or item.name in ("html", "badge", "as_json"):
                continue
            arguments.append(option_flag(item))
            if value is not True:
                arguments.append(str(value))
        return shlex.join(arguments)

    @property
    def subject(self) -> str:
        """What is checked. Raises UserError for two at once, and for options that are for something else."""
        chosen = [DATA] if self.data else []
        chosen += [kind for kind in (SCORER, EVALUATOR, WINDOWS) if getattr(self, kind.removeprefix("--")) is not None]
        if len(chosen) > 1:
            raise UserError(f"{' and '.join(chosen)} are two checks: give one of them")
        subject = chosen[0] if chosen else MODEL
        for item in fields(self):
            uses = item.metadata["uses"]
            if uses and subject not in uses and getattr(self, item.name) != item.default:
                raise UserError(f"{option_flag(item)} is for {' and '.join(uses)}, and not for {subject}")
        return subject

    @property
    def selected(self) -> list[str] | None:
        """The contracts that were chosen; None for all."""
        if self.only is None:
            return None
        return split_names(self.only)

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
        raise UserError(f"name a model: {NAME_HELP}")
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

    program: str = PROGRAM
    load: Callable[[str, Sequence[str], CheckRequest], "LoadedModel"] = load_stranger
    status: Status = progress_line
    show: Callable[["CheckReport"], None] = print_report
    show_error: Callable[[str], None] = print_error


def run_checks(words: Sequence[str], request: CheckRequest, face: CommandFace) -> int:
    """Check the models that `words` name, print their reports and give the exit code. Raises UserError.

    Of several models, one that cannot be loaded is told, and the others are checked.
    """
    subject = request.subject
    check_files(request)
    if subject in (SCORER, EVALUATOR, DATA):
        report = _check_scorer_or_data(words, request, face)
        write_files(report, request, face, words)
        _show_reports([report], request, face, listed=False)
        return exit_code(report)
    named = group_words(words)
    if len(named) > 1 and (request.html or request.badge):
        raise UserError("--html and --badge are for the report of one model")
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
        write_files(report, request, face, words)
        if not request.as_json:
            face.show(report)
    if request.as_json:
        # of several models a list, also if but one of them could be checked
        _show_reports(reports, request, face, listed=len(named) > 1)
    # what is certain comes first: a fault that was found is no doubt
    for code in (NOT_HONEST, NOT_TRIED):
        if code in codes:
            return code
    return HONEST


def check_files(request: CheckRequest) -> None:
    """Raise UserError for a file that cannot be written, before the check takes its time."""
    for flag, name in (("--html", request.html), ("--badge", request.badge)):
        if name is None:
            continue
        if Path(name).is_dir() or not Path(name).parent.is_dir():
            raise UserError(f"{flag} {name} must be a file in a folder that exists")
    if request.badge is not None and Path(request.badge).suffix not in (".svg", ".json"):
        raise UserError(f"--badge {request.badge} must end with .svg or .json")


def write_files(report: "CheckReport", request: CheckRequest, face: CommandFace, words: Sequence[str]) -> None:
    """Write the page and the badge that were asked for. Raises UserError if they cannot be written."""
    if request.html is not None:
        report.write_html(request.html, command=f"{face.program} {request.command_line(words)}")
        print(f"wrote {request.html}", file=sys.stderr)
    if request.badge is not None:
        report.write_badge(request.badge)
        print(f"wrote {request.badge}", file=sys.stderr)


def _show_reports(reports: "Sequence[CheckReport]", request: CheckRequest, face: CommandFace, *, listed: bool) -> None:
    if not request.as_json:
        for report in reports:
            face.show(report)
        return
    texts = [report.to_json() for report in reports]
    print("[" + ",\n".join(texts) + "]" if listed else texts[0])


def _check_scorer_or_data(words: Sequence[str], request: CheckRequest, face: CommandFace) -> "CheckReport":
    """Check the scorer, evaluator or data of a request. Raises UserError."""
    from manyformer.analysis.contracts.data_check import check_data
    from manyformer.analysis.contracts.importing import printing_to_stderr
    from manyformer.analysis.contracts.scorer_command import check_scorer_by_name

    if not request.data and words:
        raise UserError(f"'{words[0]}' is for a model; a scorer is named by {request.subject} alone")
    with face.status(f"checking {request.scorer or request.evaluator or 'data'}") as status, printing_to_stderr():

        def show_row(row: "ContractRow") -> None:
            status(f"checking: {row.contract} {row.verdict}")

        if request.data:
            paths = _data_paths(words)
            return check_data(paths["train"], paths.get("test"), only=request.selected, on_row=show_row)
        return check_scorer_by_name(
            scorer=request.scorer,
            evaluator=request.evaluator,
            vocab=request.vocab,
            length=request.length,
            block=request.block,
            bytes_of=request.bytes_of,
            decode=request.decode,
            encode=request.encode,
            bos=request.bos,
            partition=request.partition,
            seconds=request.seconds,
            seed=request.seed,
            only=request.selected,
            on_row=show_row,
        )


def _data_paths(words: Sequence[str]) -> dict[str, list[str]]:
    """The files and folders of train=PATH and test=PATH, each of which may be given several times."""
    paths: dict[str, list[str]] = {}
    for word in words:
        name, _, path = word.partition("=")
        if name not in ("train", "test") or not path:
            raise UserError(f"'{word}' is no data; give train=PATH, and test=PATH to compare it with")
        paths.setdefault(name, []).append(path)
    if "train" not in paths:
        raise UserError("--data needs train=PATH, a file or folder, and test=PATH to compare it with")
    return paths


def _check_one(model: NamedModel, request: CheckRequest, face: CommandFace) -> "tuple[CheckReport, int]":
    from manyformer.analysis.contracts.check import check
    from manyformer.analysis.contracts.importing import printing_to_stderr
    from manyformer.analysis.contracts.subject import Subject

    with face.status(f"loading {model.name}") as status, printing_to_stderr():
        loaded = face.load(model.name, model.values, request)

        def show_row(row: "ContractRow") -> None:
            status(f"checking {model.name}: {row.contract} {row.verdict}")

        if request.window is not None:
            report = _check_windows(loaded, request, show_row)
            return dataclasses.replace(report, subject=f"{model.name} by windows"), exit_code(report)
        options = {**loaded.options, **request.check_options}
        report = check(
            loaded.model,
            length=request.length,
            seed=request.seed,
            only=request.selected,
            skip=split_names(request.skip),
            on_row=show_row,
            **options,
        )
    promises_itself = isinstance(loaded.model, Subject)
    if not promises_itself:
        # the report names keywords of Python
        found = [HOW_TO_SAY if line.startswith(OTHERWISE) else line for line in report.assumptions]
        report = dataclasses.replace(report, subject=model.name, assumptions=(*loaded.notes, *found))
    return report, exit_code(report, promises_itself=promises_itself)


def _check_windows(
    loaded: "LoadedModel", request: CheckRequest, show_row: "Callable[[ContractRow], None]"
) -> "CheckReport":
    from torch import nn

    from manyformer.analysis.contracts.scorer_command import check_windows

    if not isinstance(loaded.model, nn.Module):
        raise UserError("--window is for an nn.Module; of another model name a function by --scorer")
    assert request.window is not None
    vocab = request.vocab or loaded.options.get("vocabulary")
    return check_windows(
        loaded.model,
        request.window,
        request.stride,
        vocab=vocab,
        length=request.length,
        seconds=request.seconds,
        seed=request.seed,
        only=request.selected,
        on_row=show_row,
    )


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
        if row.place is not None:
            lines += [f"  {printable(line)}" for line in row.place.lines(width - 2)]
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
    request = read_request(options)
    try:
        if not options["names"] and request.subject == MODEL:
            parser.print_help()
            # a hook that names no model by mistake must not pass
            return NOT_TRIED
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
