"""Every command of the pages runs: as a dry run, on tiny runs, or as it stands; the others are read by their parser.

`READ_ALONE` says which are only read, and why."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from documented_samples import RUNS, train_once, write_files, write_training_files
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.cli.app import app
from test_documentation import COMMANDS, FENCED, ROOT, WRITTEN, command_lines, page_id

READ_ALONE = {
    r"\.\.\.|\b[A-Z]{2,}\b": "names to fill in",
    r"\b(downloads|models|adapters)\b": "a model of transformers, or made from one",
    r"--import\b|\.py:|kernel=mean": "a module of the reader, or one that tests/examples/test_leaks.py checks",
    r"^check --data ": "files of the reader, as in tests/analysis/contracts/test_scorer_command.py",
    r"\bdevices=": "several devices",
    r"init_from=runs/softmax|--datastore|runs/(memory-8k|lm-stdlib-64|six-heads)|^datastore ": "an earlier step",
    r"branch_from=": "a checkpoint of an earlier step",
    r"--find-lr": "takes steps for minutes, as in tests/cli/test_cli_train.py",
    r"^doctor --tune": "an option that is gone, of which the changelog tells",
    r"--serve": "serves until it is stopped",
    r"--lines": "a pipe",
    r"--calibrate|^compare suite/(full .*lstm-lm|better-training)": "measures for minutes",
    r"runs/(audio|answer|modalities|graphs)-|images-(pixels|classes|super)": "archives, as in tests/models/tasks",
    r"\bsuite\.yaml|^advise ": "a suite of the reader, or its results",
    r"\bfive": "a file and runs of a tutorial, which tests/test_tutorials.py runs",
    r"classify/pretrained": "a folder that a script prepares",
    r"--keep |shared_qk_dim": "heads of a usual size",
    r"runs/(calm|depth-adaptive)": "models with early exits, which tests/inference/early_exit has",
}
"""Commands that are not started, as patterns, with what they need."""
SLOW = (
    r"^(check|export|heads|spans|doctor|plan|calibrate)\b|^baselines .|^show (?!transformer$|.*--pattern)"
    r"|^compare (translation/kernels|surgery/linear|mixers/language|rl/gates)"
    r"|^regress --out|--input|^attention runs/one|runs/(universal|adaptive-span|rl-|memory|images-|lm-memory)"
)
"""Commands that take seconds: they run with the slow tests."""
DRY = ("train", "compare")
"""Commands whose names and settings are resolved, and whose models are built by slow tests; nothing is trained."""
MEASURED = "bench"
"""The command that reads its arguments here, but measures nothing: that takes minutes."""


def words_of(line: str) -> list[str]:
    # two spaces begin an explanation
    return shlex.split(re.split(r"\s{2,}|\s[|<>]\s", line)[0])[1:]


def command_name(words: list[str]) -> tuple[str, ...]:
    """The words that name the command; () for a group or no command."""
    return next((name for name in COMMANDS if tuple(words[: len(name)]) == name), ())


def is_mention(words: list[str]) -> bool:
    """Whether a line only names a command, with or without an option, but lacks an argument that it needs."""
    name = command_name(words)
    needs = any(p.param_type_name == "argument" and p.required for p in COMMANDS[name].params) if name else True
    bare = words[len(name) :]
    return (needs and (not bare or bare[0].startswith("--"))) or words in (
        ["train"],
        ["record"],
        ["check"],
        ["check", "--scorer"],
    )


def reason_to_read(words: list[str]) -> str | None:
    line = " ".join(words)
    return next((reason for pattern, reason in READ_ALONE.items() if re.search(pattern, line)), None)


def documented() -> Iterator[list[str]]:
    """The words of all commands in the pages, each once."""
    # the page that records what failed before has a script that types its commands
    pages = [page for page in WRITTEN if page.name != "first-minutes.md"]
    lines = dict.fromkeys(line for page in pages for line in command_lines(page))
    yield from {tuple(words): words for words in map(words_of, lines)}.values()


def examples() -> Iterator[list[str]]:
    """The words of the examples that `--help` shows, as the page of commands does."""
    for command in COMMANDS.values():
        lines = (command.epilog or "").replace("\\[", "[").splitlines()
        yield from (words_of(line) for line in lines if line.startswith("manyformer "))


LINES = list(documented())
EXAMPLES = [words for words in examples() if words not in LINES and command_name(words)]
MENTIONS = [words for words in LINES if is_mention(words)]
OTHERS = [words for words in LINES if words not in MENTIONS]
READ = [words for words in OTHERS if reason_to_read(words)]
STARTED = [words for words in OTHERS if words not in READ]
DRY_RUNS = [words for words in STARTED if words[0] in DRY and len(words) > 1 and not {"--help", "--show"} & {*words}]
BENCHMARKS = [words for words in STARTED if words[0] == MEASURED]
CARRIED_OUT = [words for words in STARTED if words not in (*DRY_RUNS, *BENCHMARKS)]


def marked(commands: list[list[str]]) -> list[Any]:
    """Parameters of a test, of which some are slow."""
    slow = [
        [pytest.mark.slow, pytest.mark.timeout(1200)] * bool(re.search(SLOW, " ".join(words))) for words in commands
    ]
    return [pytest.param(words, marks=marks, id=" ".join(words)) for words, marks in zip(commands, slow, strict=True)]


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    write_files(folder)
    return folder


@pytest.fixture
def here(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the files that commands name."""
    for file in samples.iterdir():
        if file.name != "runs":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    return tmp_path


def provide_runs(words: list[str], samples: Path, folder: Path) -> None:
    """The runs that a command names, each a tiny one of its kind."""
    for name in dict.fromkeys(re.findall(r"\bruns/([\w-]+)", " ".join(words))):
        if name in RUNS:
            (folder / "runs" / name).symlink_to(train_once(samples, RUNS[name]))


def test_no_documented_command_is_left_out() -> None:
    assert sorted([*MENTIONS, *READ, *DRY_RUNS, *BENCHMARKS, *CARRIED_OUT]) == sorted(LINES)
    assert len(CARRIED_OUT) + len(DRY_RUNS) > 150
    for page in WRITTEN:
        # only fences are read above
        assert re.findall(r"^ {4,}manyformer .*", FENCED.sub("", page.read_text()), re.MULTILINE) == [], page
    lines = [" ".join(words) for words in OTHERS]
    unused = [pattern for pattern in READ_ALONE if not any(re.search(pattern, line) for line in lines)]
    assert unused == []


@pytest.mark.thinned(4)
@pytest.mark.parametrize("words", marked(DRY_RUNS))
def test_the_settings_of_a_documented_training_are_valid(
    words: list[str], samples: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provide_runs(["runs/masked-stdlib"] if "classify/fine-tune" in words else words, samples, here)
    option = "--print-config" if words[0] == "train" else "--dry-run"
    code = run([*(word for word in words if word not in ("--dry-run", "--print-config")), option])
    # a dry run of a comparison opens its data, which the reader of a page brings along; the samples here are small
    problems = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == (2 if problems else 0)
    expected = ("there is no such file", "fewer than one batch of")
    assert all(any(reason in line for reason in expected) for line in problems), problems


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in DRY_RUNS if words[0] == "train"], ids=" ".join)
def test_a_documented_training_can_be_started(
    words: list[str], samples: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is built, which takes seconds for large ones, and the data is read where the samples have it."""
    write_training_files(here)
    provide_runs(["runs/masked-stdlib"] if "classify/fine-tune" in words else words, samples, here)
    code = run([*words, *(["--dry-run"] * ("--dry-run" not in words))])
    printed = capsys.readouterr()
    assert code == (2 if "there is no such file" in printed.err else 0), printed.err
    assert "parameters" in printed.out


@pytest.mark.parametrize("words", marked(CARRIED_OUT))
def test_a_documented_command_runs(words: list[str], samples: Path, here: Path, request: pytest.FixtureRequest) -> None:
    provide_runs(words, samples, here)
    if words[0] == "check":
        # which compiles the model
        request.getfixturevalue("unchecked")
    if words[:2] == ["runs", "copy"]:
        (here / words[-1]).unlink()
    fails = words[0] == "check" and bool({"routing=top-k", "routing_transformer:RoutingTransformerLM"} & {*words})
    assert run(words) == fails, "of these a check fails alone, as its page says"


@pytest.mark.parametrize("words", BENCHMARKS, ids=" ".join)
def test_the_arguments_of_a_documented_benchmark_are_valid(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(candidates: list[object], lengths: list[int], **options: object) -> None:
        raise UserError(f"{len(candidates)} candidates at {len(lengths)} lengths")

    monkeypatch.setattr("manyformer.analysis.benchmarks.bench", measure)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    with pytest.raises(UserError, match=r"[1-9] candidates at [1-9] lengths"):
        COMMANDS[(MEASURED,)].main(words[1:], standalone_mode=False)


@pytest.mark.parametrize("words", [*READ, *EXAMPLES], ids=" ".join)
def test_the_parser_reads_a_documented_command(words: list[str]) -> None:
    """Options exist, their values are of the right kind, and no argument is missing or too many."""
    name = command_name(words)
    assert name or words[0].isupper()
    filled = ["8" if word == "N" else word for word in words[len(name) :]]
    if name and "--help" not in words:
        with COMMANDS[name].make_context(" ".join(name), without_imports(filled)):
            pass


def without_imports(words: list[str]) -> list[str]:
    """The words that the parser of a command gets: `--import MODULE` is taken before."""
    if "--import" not in words:
        return words
    place = words.index("--import")
    return [*words[:place], *words[place + 2 :]]


@pytest.mark.parametrize("words", MENTIONS, ids=" ".join)
def test_a_named_command_exists(words: list[str]) -> None:
    name = command_name(words)
    options = COMMANDS[name].params if name else typer.main.get_command(app).params
    known = {"--help"} | {option for parameter in options for option in parameter.opts}
    assert {word for word in words[len(name) :] if word.startswith("--")} <= known


@pytest.mark.parametrize("page", WRITTEN, ids=page_id)
def test_documented_files_exist_and_scripts_have_their_options(page: Path) -> None:
    text = page.read_text()
    files = {name.rstrip(".") for name in re.findall(r"(?<![\w/])((?:tests|benchmarks)/[\w./-]+)", text)}
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    for name, words in re.findall(r"python (benchmarks/\w+\.py)([^`\n|]*)", text):
        folder, code = (ROOT / name).parent, (ROOT / name).read_text()
        shared = [folder / f"{module}.py" for module in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)]
        code += "".join(file.read_text() for file in shared if file.exists())
        # two spaces begin an explanation
        options = re.findall(r"(?<!\S)--[a-z][\w-]*", re.split(r"\s{2,}", words)[0])
        assert [option for option in options if f'"{option}"' not in code] == [], name
