"""Run files and command lines as a slipping hand or a broken script would write them."""

import random
import time
from pathlib import Path
from typing import Any

import yaml

from fault_injection import scenarios
from fault_injection.hostile_fields import places, replaced
from fault_injection.outcomes import NotRun, Trial, judge
from fault_injection.scenarios import Command
from fault_injection.verbs import USES, options_of
from fault_injection.workshop import Workshop

FAMILY = "mutations"
RUN_FILE = "mine.yaml"
LAST_WORDS = ("limits.steps=2", "evaluate.every=null", "out=mutated")
"""Given last, so that nothing trains for long; a mutated run file is otherwise taken at its word."""

VALUES: tuple[Any, ...] = (
    None,
    "",
    "text",
    [],
    {},
    -1,
    0,
    True,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    10**9,
    10**23,
    "nothing/here",
    "/dev/full",
    "/dev/zero",
    ".",
    "\x1b[31mred",
    "e\u0301\U0001f600",
    "\x00",
    "x" * 100_000,
    [[["a"]]],
)
WORDS = (
    "--json",
    "",
    "-",
    "--",
    "=",
    "==",
    "a=b",
    "data.=1",
    ".=",
    "\x00".strip("\x00"),
    "é",
    "--data.path",
    "x" * 5000,
)


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """One mutation of a run file, of a setting on the command line, or of another command's options."""
    chance = workshop.chance(FAMILY, number)
    if number % 2 == 1:
        deed, command, names = mutate_option(workshop, chance)
    else:
        workshop.set_up(scenarios.LANGUAGE, finished=True)
        settings = yaml.safe_load((workshop.here / "run/run.yaml").read_text(encoding="utf-8"))
        mutate = (mutate_file, mutate_setting, mutate_text)[number // 2 % 3]
        deed, command, names = mutate(workshop.here, settings, chance)
    began = time.monotonic()
    result = workshop.run(command)
    outcome, detail = judge(result, names, same=None)
    return Trial(FAMILY, number, deed, outcome, str(result)[:500], detail, time.monotonic() - began)


Mutation = tuple[str, Command, set[str]]


def mutate_file(folder: Path, settings: Any, chance: random.Random) -> Mutation:
    """A run file with another value, another key or very many keys."""
    place = chance.choice([place for place in places(settings) if place])
    names = set[str]()
    kind = chance.choice(("value", "value", "value", "key", "keys"))
    if kind == "value":
        value = chance.choice(VALUES)
        names |= {value} if isinstance(value, str) and value.strip() else set()
        settings, deed = replaced(settings, place, value), f"{'.'.join(map(str, place))}: {value!r:.40}"
    elif kind == "key":
        key = chance.choice(("", "x" * 100_000, "a.b", "\x1b[31m", 5, None, True, str(place[-1]) + "s"))
        settings, deed = {**settings, key: 1}, f"the key {key!r:.40}"
    else:
        settings, deed = {**settings, **{f"key{index}": index for index in range(60_000)}}, "60,000 unknown keys"
    text = yaml.safe_dump(settings, allow_unicode=chance.random() < 0.5)
    (folder / RUN_FILE).write_text(text, encoding="utf-8", errors="surrogatepass")
    return f"run file: {deed}", ("train", RUN_FILE, *LAST_WORDS), {RUN_FILE, str(place[-1]), str(place[0]), *names}


def mutate_text(folder: Path, settings: Any, chance: random.Random) -> Mutation:
    """A run file with some characters changed, doubled or taken away."""
    text, at = yaml.safe_dump(settings), 0
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text))
        signs = chance.choice(
            (":", "  ", "\t", "&a ", "*a", "!!set", "{", "]", "'", "\0", "\x85", "\ufeff", "\n", "- ", "")
        )
        text = text[:at] + signs + text[at + chance.randint(0, 3) :]
    (folder / RUN_FILE).write_text(text, encoding="utf-8")
    return (
        f"run file: changed by hand near {text[max(0, at - 10) : at + 10]!r}",
        ("train", RUN_FILE, *LAST_WORDS),
        {
            RUN_FILE,
            *settings,
            *(key for section in settings.values() if isinstance(section, dict) for key in section),
        },
    )


def mutate_setting(folder: Path, settings: Any, chance: random.Random) -> Mutation:
    """A setting on the command line with another value, or a word that is no setting."""
    command = ("train", "run/run.yaml")
    if chance.random() < 0.25:
        word = chance.choice(WORDS)
        return f"the word {word!r:.40}", (*command, word, *LAST_WORDS), {word, "run.yaml", "=", "out", "setting"}
    place = chance.choice([place for place in places(settings) if place and not isinstance(place[-1], int)])
    key, value = ".".join(map(str, place)), chance.choice(VALUES)
    written = "null" if value is None else str(value).replace("\0", "\\0")
    names = {key, str(place[-1]), "run.yaml", *([written] if written.strip() else [])}
    return f"{key}={written:.40}", (*command, f"{key}={written}", *LAST_WORDS), names


def mutate_option(workshop: Workshop, chance: random.Random) -> Mutation:
    """An option of any command with a value that it may not have."""
    use = chance.choice([use for use in USES if options_of(use.verb)])
    workshop.set_up(use.scenario, finished=use.finished)
    option, value = chance.choice(options_of(use.verb)), str(chance.choice(VALUES)).replace("\0", "")
    command = (*use.command, option, value)
    names = {option, option.strip("-"), value if value.strip() else repr(value)}
    # an option of a run is told as the setting that it stands for
    names |= {word for word in use.command if word == option.strip("-")}
    return f"{use.verb} {option} {value:.40}", command, names
