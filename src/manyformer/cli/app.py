"""The command-line application: dispatch of commands, error messages and exit codes.

Exit codes: 0 success, 1 a defect or a failed contract, 2 an error in the user's input, 130 stopped by Ctrl-C or
SIGTERM.
"""

import errno
import inspect
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer import Option
from typer.models import CommandInfo

from manyformer.base import VERSION
from manyformer.base.errors import NonFiniteWeights, TrainingInterrupted, UserError, UserErrors
from manyformer.base.plugins import import_from_command_line
from manyformer.base.system import STOPPED as STOPPED
from manyformer.base.system import discard
from manyformer.cli.console import Output, print_error, print_note, print_output
from manyformer.cli.options import F, JsonOption, suggest_options

DONE = 0
DEFECT = 1
MISTAKE = 2

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

app = typer.Typer(
    name="manyformer",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="""[bold]Begin here[/bold]
manyformer train lm/stdlib                 train a language model on Python's own library
manyformer generate runs/lm-stdlib "def "  generate text with it
manyformer list                            all recipes; show NAME explains one
manyformer COMMAND --help                  settings with defaults, and examples""",
)

# the panels of `manyformer --help`, in this order
FIND = "Find"
TRAIN = "Train"
USE = "Use"
JUDGE = "Judge and compare"

RENAMED_COMMANDS = {"paint": "generate", "tag": "predict"}
"""The commands that took the place of earlier ones."""

EARLIER_FORMS = {"thresholds": ("calibrate", "--sweep")}
"""Commands of version 0.2 with the words that stand for them."""


def command(
    panel: str | None,
    *examples: str,
    name: str | None = None,
    group: typer.Typer = app,
    accepts_settings: bool = False,
    adds_help: bool = True,
    hidden: bool = False,
) -> Callable[[F], F]:
    """Register a function as a command in a panel of the help, with complete example commands at the end of its help.

    What it returns is printed: a command that returns an `Output` has the option --json. With `accepts_settings`
    options that the command does not have, such as --depth, are passed on as arguments.
    """
    register = group.command(
        name,
        rich_help_panel=panel,
        add_help_option=adds_help,
        context_settings={"ignore_unknown_options": True} if accepts_settings else None,
        epilog=examples_epilog(*examples) if examples else None,
        hidden=hidden,
    )

    def add(function: F) -> F:
        returns_output = inspect.signature(function).return_annotation is Output
        register(_printing(function) if returns_output else function)
        return function

    return add


def sort_commands(names: Sequence[str]) -> None:
    """Bring the commands into the order of `names`, in which the panels of the help show them."""

    def place(registered: CommandInfo) -> int:
        name = registered.name or getattr(registered.callback, "__name__", "")
        if name in names:
            return names.index(name)
        return len(names)

    app.registered_commands.sort(key=place)


def _printing(function: Callable[..., Output]) -> Callable[..., int]:
    """The command that prints what `function` returns, with the option --json at the end of its options.

    A function that has the parameter `as_json` itself is given the choice, too.
    """
    signature = inspect.signature(function)
    parameters = dict(signature.parameters)
    takes_choice = "as_json" in parameters
    # last, so that --json ends the list of options in every help
    parameters.setdefault("as_json", Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption))

    @wraps(function)
    def run(*arguments: Any, as_json: bool, **options: Any) -> int:
        if takes_choice:
            options["as_json"] = as_json
        output = function(*arguments, **options)
        print_output(output, as_json=as_json)
        if output.ok:
            return DONE
        return DEFECT

    # typer reads options from the signature, which `wraps` would take from the function
    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return run


def examples_epilog(*lines: str) -> str:
    """The epilog of a command's help: complete example commands."""
    return "[bold]Examples[/bold]\n" + "\n".join(line.replace("[", "\\[") for line in lines)


def _show_version(requested: bool) -> None:  # noqa: FBT001 - typer passes the value
    if requested:
        typer.echo(f"manyformer {VERSION}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error; may be given anywhere.")] = False,
    imports: Annotated[
        list[str] | None,
        Option(
            "--import",
            metavar="MODULE",
            help="Import a module or file that defines a recipe, task or kind of data; may be given several times.",
        ),
    ] = None,
) -> None:
    """Train, check, score, run and compare every kind of Transformer."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code, after the modules of the commands are imported."""
    debug, imports, remaining = _take_global_options(list(arguments))
    # a shell asks for completions: typer answers and ends the process
    if "_MANYFORMER_COMPLETE" in os.environ:
        app(prog_name="manyformer")
    with warnings.catch_warnings():
        # restored after the command: a process that calls `run` has its own way to show warnings
        warnings.showwarning = _show_warning
        return _run_reporting_errors(imports, remaining, debug=debug)


def _run_reporting_errors(imports: list[str], remaining: list[str], *, debug: bool) -> int:
    try:
        import_from_command_line(imports)
        code = _invoke(remaining)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader closed the pipe (`| head`); Python's own flush at exit must not fail on it either
        discard(sys.stdout)
        return DONE
    except TrainingInterrupted as stop:
        print_error(str(stop), mark="")
        return STOPPED
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report_error(error, debug=debug, has_own_modules=bool(imports))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning about the user's files as a note; others with the line of code, as Python does."""
    if issubclass(category, NonFiniteWeights):
        print_note(f"warning: {message}")
    else:
        stream = sys.stderr if file is None else file
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=stream)


def _invoke(arguments: list[str]) -> int:
    if arguments and arguments[0] in RENAMED_COMMANDS:
        raise UserError(f"`manyformer {arguments[0]}` is now `manyformer {RENAMED_COMMANDS[arguments[0]]}`")
    if arguments and arguments[0] in EARLIER_FORMS:
        form = EARLIER_FORMS[arguments[0]]
        print_note(f"`manyformer {arguments[0]}` is now `manyformer {' '.join(form)}`")
        arguments = [*form, *arguments[1:]]
    _check_out(arguments)
    command = typer.main.get_command(app)
    # typer keeps the line breaks of docstrings, which are those of an editor
    for subcommand in getattr(command, "commands", {}).values():
        subcommand.help = _join_lines(subcommand.help or "")
    try:
        with command.make_context("manyformer", arguments) as context:
            result = command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except UserErrors as error:
        # a misspelled option was taken for a setting, whose errors do not know of options
        used = getattr(command, "commands", {})[arguments[0]]
        options = [option for parameter in used.params for option in parameter.opts if option[:2] == "--"]
        raise UserErrors(suggest_options(error.lines, arguments, options)) from error
    if isinstance(result, int):
        return result
    return DONE


def _check_out(arguments: list[str]) -> None:
    """Raise UserError for an `--out` without a text, as of a variable that is not set: it would mean this folder."""
    options = arguments[: _options_end(arguments)]
    if "--out=" in options or ("--out", "") in pairwise(options):
        raise UserError("--out is empty; give the file or folder to write, or leave it out")


def _options_end(arguments: list[str]) -> int:
    """The place of a bare `--`, behind which nothing is an option; without one, the end."""
    if "--" in arguments:
        return arguments.index("--")
    return len(arguments)


def _join_lines(text: str) -> str:
    """Join the lines of each paragraph of a docstring, so that help can wrap them to the terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def _take_global_options(arguments: list[str]) -> tuple[bool, list[str], list[str]]:
    """Remove `--debug` and `--import MODULE`, which may be given anywhere before a bare `--`.

    Returns whether `--debug` was given, the modules, and the other arguments.
    """
    end = _options_end(arguments)
    options = arguments[:end]
    imports = list[str]()
    remaining = list[str]()
    while options:
        argument = options.pop(0)
        if argument.startswith("--import="):
            imports.append(argument.removeprefix("--import="))
        elif argument == "--import" and options:
            imports.append(options.pop(0))
        elif argument != "--debug":
            remaining.append(argument)
    return "--debug" in arguments[:end], imports, remaining + arguments[end:]


def _report_error(error: Exception, *, debug: bool, has_own_modules: bool) -> int:
    """Print one line for each error and return the exit code."""
    if isinstance(error, typer.TyperException):
        return _report_usage_error(error)
    if isinstance(error, ValueError):
        # the message of UserErrors has a line for each error
        print_error(str(error))
        return MISTAKE
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None and error.errno in _FULL:
            # files are written by one writer, which names them: only what is printed has no name
            discard(sys.stdout)
            print_error(f"{error.strerror}: standard output could not be written")
            return MISTAKE
        print_error(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
        return MISTAKE
    if isinstance(error, MemoryError | RuntimeError):
        from manyformer.nn.runtime.devices import SMALLER_WORK, describe_request, is_out_of_memory

        if is_out_of_memory(error):
            print_error(f"out of memory{describe_request(error)}; {SMALLER_WORK}")
            return MISTAKE
    if isinstance(error, TypeError | RuntimeError):
        from manyformer.nn.runtime.devices import describe_missing

        if (sentence := describe_missing(error, "this command")) is not None:
            print_error(sentence)
            return MISTAKE
    if has_own_modules and (place := _own_place(error)) is not None:
        print_error(f"{place}: {type(error).__name__}: {error}; mend that file (--debug shows the traceback)")
        return MISTAKE
    print_error(f"{type(error).__name__}: {error}")
    if not debug:
        print_error("this is a defect of manyformer; run the same command with --debug for a traceback")
    return DEFECT


def _own_place(error: Exception) -> str | None:
    """The line of the user's own file in which an error was raised; None for one of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    file = Path(frames[-1].filename)
    installed = (
        Path(__file__).parents[1],
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    )
    if not file.is_file() or any(file.is_relative_to(folder) for folder in installed):
        return None
    return f"{file}:{frames[-1].lineno}"


def _report_usage_error(error: typer.TyperException) -> int:
    # errors of typer differ in what they know
    context = getattr(error, "ctx", None)
    message = error.format_message()
    if option := getattr(error, "option_name", None):
        suggestions = getattr(error, "possibilities", None)
        if suggestions is not None:
            hint = "--help lists the options"
            if suggestions:
                hint = f"did you mean {' or '.join(sorted(suggestions))}?"
            message = f"there is no option {option}; {hint}"
    # as all other messages begin, after "error: "
    print_error(message[:1].lower() + message[1:])
    if context is not None:
        print_error(f"'{context.command_path} --help' explains the command", mark="")
    return MISTAKE
