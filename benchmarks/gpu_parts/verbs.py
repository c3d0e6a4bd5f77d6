"""The command line as its user types it, with the defaults of the device: train, resume, evaluate, generate, check."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import manyformer
from gpu_parts.outcome import Item, Outcome, Setting, judged

SOURCES = Path(manyformer.__file__).parents[1]
SECONDS = 140.0
RUN = "run"
TINY = ("depth=1", "dim=32", "heads=2", "data.length=64", "limits.steps=6")
"""Settings of a rehearsal."""


def chains(setting: Setting) -> Mapping[str, Sequence[Sequence[str]]]:
    """Commands that follow each other in one folder."""
    steps = TINY if setting.tiny else ("limits.steps=30",)
    short = (*steps, "evaluate.every=15", "save.every=15", "log.every=5", f"out={RUN}")
    return {
        "a text": (
            ("train", "lm/stdlib", *short),
            ("train", "lm/stdlib", *short, "limits.steps=45"),
            ("evaluate", RUN),
            ("generate", RUN, "def ", "--max-new", "24"),
            ("check", RUN),
        ),
        "a task by rules": (("train", "rules/copy", *short), ("evaluate", RUN)),
        "doctor": (("doctor",),),
    }


def items(setting: Setting) -> dict[str, Item]:
    """Each chain."""
    return {name: partial(run_chain, setting, commands) for name, commands in chains(setting).items()}


def run_chain(setting: Setting, commands: Sequence[Sequence[str]]) -> Outcome:
    """Every command must end well; what each said last is kept."""
    ends: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for words in commands:
            output, fault = run_verb(words, Path(folder), SECONDS)
            if fault:
                return judged("; ".join(ends), [fault], {})
            last = output.strip().splitlines()[-1:]
            ends.append(f"{words[0]}: {' '.join(last).strip()[:160]}")
    return judged("; ".join(ends), [], {})


def run_verb(words: Sequence[str], folder: Path, seconds: float | None) -> tuple[str, str]:
    """What a command in `folder` printed, and why it failed, if it did; `seconds` is the most that it may take."""
    # where the package is not installed, commands in another folder find it as this process does
    paths = [str(SOURCES), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "manyformer", *words]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"{' '.join(words)}: not finished after {seconds:.0f} s"
    if done.returncode != 0:
        words_of_error = (done.stderr.strip() or done.stdout.strip())[-600:]
        return "", f"{' '.join(words)}: exit code {done.returncode}: {words_of_error}"
    return done.stdout.strip() or done.stderr.strip(), ""
