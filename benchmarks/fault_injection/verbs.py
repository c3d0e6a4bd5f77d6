"""Every command of manyformer, each with a scenario in which it ends in a second or two."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from typer.main import get_command

from fault_injection import scenarios
from fault_injection.scenarios import Command, Scenario
from manyformer.cli import import_commands
from manyformer.cli.app import app


@dataclass(frozen=True)
class Use:
    """A command in the folder of a scenario: before the scenario's own command, or after it (`finished`)."""

    scenario: Scenario
    command: Command
    finished: bool = True
    paths: tuple[str, ...] = ()
    """The arguments that are files or folders which the command reads."""

    @property
    def verb(self) -> str:
        """The first word, or the first two of a command with subcommands."""
        return " ".join(self.command[:2]) if self.command[0] in ("datastore", "runs") else self.command[0]


LANGUAGE, LABELS = scenarios.LANGUAGE, scenarios.LABELS
USES: tuple[Use, ...] = (
    Use(LANGUAGE, LANGUAGE.command, finished=False, paths=("data.path=text.txt",)),
    Use(LABELS, LABELS.command, finished=False, paths=("data.path=labels.tsv",)),
    Use(LANGUAGE, scenarios.GENERATE, paths=("run",)),
    Use(scenarios.TRANSLATION, ("translate", "run", "--input", "pairs.tsv", "--max-new", "2"), paths=("pairs.tsv",)),
    Use(scenarios.CAPTIONS, ("caption", "run", "captions.npz", "--max-new", "2", "--json"), paths=("captions.npz",)),
    Use(scenarios.SPEECH, ("transcribe", "run", "sounds/low", "--json"), paths=("run", "sounds/low")),
    Use(LANGUAGE, ("evaluate", "run", "--data", "text.txt", "--json"), paths=("run", "text.txt")),
    Use(LABELS, ("predict", "run", "labels.tsv", "--json"), paths=("run", "labels.tsv")),
    Use(scenarios.TREES, ("predict", "run", "trees.conllu", "--json"), paths=("run", "trees.conllu")),
    Use(scenarios.PICTURES, ("predict", "run", "pictures/dark", "--json"), paths=("run", "pictures/dark")),
    Use(scenarios.SOUNDS, ("predict", "run", "sounds/low", "--json"), paths=("run", "sounds/low")),
    Use(LANGUAGE, ("check", "run", "--only", "causal"), paths=("run",)),
    Use(LANGUAGE, ("bench", "transformer-lm", "--lengths", "16", "--rounds", "1", "--what", "forward", "dim=16")),
    Use(scenarios.COMPARISON, scenarios.COMPARISON.command, finished=False, paths=("two.yaml",)),
    Use(LANGUAGE, ("view", "run", "to be", "--out", "page.html"), paths=("run",)),
    Use(LANGUAGE, ("attention", "run", "to be", "--json"), paths=("run",)),
    Use(LANGUAGE, ("heads", "run", "--sentences", "4", "--json"), paths=("run",)),
    Use(scenarios.FOREIGN, scenarios.FOREIGN.command, finished=False, paths=("llama",)),
    Use(scenarios.EXPORT, scenarios.EXPORT.command, finished=False, paths=("run",)),
    Use(scenarios.TO_HUGGING_FACE, scenarios.TO_HUGGING_FACE.command, finished=False, paths=("run",)),
    Use(scenarios.PRUNING, scenarios.PRUNING.command, finished=False, paths=("run",)),
    Use(
        scenarios.EXITS,
        ("calibrate", "run", "--tolerance", "0.9", "--data", "other.jsonl", "--documents", "4", "--max-new", "2"),
        paths=("run", "other.jsonl"),
    ),
    Use(scenarios.EXITS, ("calibrate", "run", "--sweep", "--prompts", "2", "--values", "0.5"), paths=("run",)),
    Use(scenarios.EXITS, ("calibrate", "run", "--text", "to be", "--json"), paths=("run",)),
    Use(scenarios.SPANS, ("spans", "run", "--json"), paths=("run",)),
    Use(
        scenarios.DATASTORE,
        ("datastore", "build", "run", "--data", "text.txt", "--out", "more"),
        paths=("run", "text.txt"),
    ),
    Use(scenarios.DATASTORE, ("datastore", "index", "store"), paths=("store",)),
    Use(scenarios.DATASTORE, ("datastore", "tune", "run", "store", "--json"), paths=("run", "store")),
    Use(
        scenarios.DATASTORE,
        ("datastore", "evaluate", "run", "store", "--neighbours", "4", "--json"),
        paths=("run", "store"),
    ),
    Use(scenarios.DATASTORE, ("datastore", "look", "run", "store", "to be", "--json"), paths=("run", "store")),
    Use(
        scenarios.DATASTORE,
        ("datastore", "neighbours", "run", "store", "--out", "near", "--min-distance", "8"),
        paths=("run", "store"),
    ),
    Use(scenarios.POLICY, ("record", "run", "--out", "episodes.npz", "--episodes", "1"), paths=("run",)),
    Use(scenarios.POLICY, ("play", "run", "--out", "episode.gif"), paths=("run",)),
    Use(LANGUAGE, ("plot", "run", "--out", "curves.svg"), paths=("run",)),
    Use(LANGUAGE, ("plan", "transformer-lm", "dim=16", "--json")),
    Use(LANGUAGE, ("show", "transformer-lm", "--json")),
    Use(LANGUAGE, ("show", "run", "--json"), paths=("run",)),
    Use(LANGUAGE, ("list", "--json")),
    Use(LANGUAGE, ("runs", "list")),
    Use(LANGUAGE, ("runs", "show", "lm/stdlib")),
    Use(LANGUAGE, ("runs", "copy", "lm/stdlib", "mine.yaml")),
    Use(LANGUAGE, ("runs", "schema")),
    Use(LANGUAGE, ("regress", "--out", "fit.png", "--json")),
    Use(LANGUAGE, ("baselines", "mqar", "--examples", "8", "--json")),
    Use(LANGUAGE, ("doctor", "run"), paths=("run",)),
    Use(LANGUAGE, ("advise", "--length", "2000", "--task", "recall", "--json")),
)


def verbs_of_manyformer() -> set[str]:
    """The commands that `manyformer --help` lists, those of `datastore` and `runs` one by one."""
    verbs = set()
    for name, command in _command_line().commands.items():
        if command.hidden:
            continue
        subcommands = getattr(command, "commands", {})
        verbs |= {f"{name} {part}" for part in subcommands} or {name}
    return verbs


def options_of(verb: str) -> list[str]:
    """The options of a command that take a value."""
    command = _command_line()
    for word in verb.split():
        command = command.commands[word]
    options = [option for option in command.params if option.opts[0].startswith("--")]
    return sorted(option.opts[0] for option in options if not option.is_flag and option.name != "help")


@cache
def _command_line() -> Any:
    """The command line with all its commands, whose modules are imported for it."""
    import_commands()
    return get_command(app)
