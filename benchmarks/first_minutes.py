"""Type what README and the pages say, as four new users would, and write how long each takes to the goal.

    python benchmarks/first_minutes.py                        the four users, with this package
    python benchmarks/first_minutes.py --fast                 the same with the smallest trainings, nothing is written
    python benchmarks/first_minutes.py --before TREE          the same goals by the pages of another version's tree
    python benchmarks/first_minutes.py --packages FOLDER      the owner of a leak also checks a released package

A user is a record: a goal, a folder with what he has, and commands, each of which stands so on the page that it names.
Own time is what a person spends: reading the prose of the sections that the commands stand in and what the commands
print, at 200 words a minute, and typing the commands at 200 characters a minute; the machine's time stands beside it.
Of the last command's lines those up to the answer are read, and a line that differs from an earlier one in numbers
alone, as those of progress, is read once. Every command must end with the exit code and say what its
page promises. docs/first_minutes.json keeps the texts."""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "first_minutes.json"
WORDS_A_MINUTE = 200
CHARACTERS_A_MINUTE = 200
MOST_LINES = 60
"""The most lines of a text that the record keeps: its first and its last ones."""


class Step(NamedTuple):
    """A command as it stands on a page, the code it must end with, and what it must say.

    `fast` is added in the fast mode; `seconds` ends a command that would take hours, as Ctrl-C does."""

    command: str
    page: str
    says: tuple[str, ...] = ()
    code: int = 0
    fast: str = ""
    seconds: float | None = None


class User(NamedTuple):
    """A person with a goal, what lies in the folder, the commands to the goal, and the most minutes of own time."""

    name: str
    goal: str
    minutes: float
    prepare: Callable[[Path], None]
    steps: tuple[Step, ...]


def write_table(folder: Path) -> None:
    """A CSV with a header and labeled texts, further texts, and a table that is kept apart."""
    things = ["soup", "salad", "cake", "bread", "meeting", "deadline", "report", "office"]
    ends = ["made everybody happy", "was a disappointment", "came late again", "was better than last year"]
    openings = ["this year", "as always", "to be honest", "yesterday", "in our town", "once more", "for the guests"]
    kinds = ["first", "second", "long", "new", "old", "small", "free", "famous", "usual"]
    rows = [
        f"{opening} the {kind} {thing} {end},{'food' if number < 4 else 'work'}"
        for opening in openings
        for kind in kinds
        for number, thing in enumerate(things)
        for end in ends
    ]
    (folder / "reviews.csv").write_text("comment,topic\n" + "\n".join(row for row in rows if "usual" not in row) + "\n")
    (folder / "other.csv").write_text("comment,topic\n" + "\n".join(row for row in rows if "usual" in row) + "\n")
    (folder / "reviews.tsv").write_text("comment\ttopic\n" + "\n".join(rows).replace(",", "\t") + "\n")
    (folder / "new.txt").write_text("the cake was a disappointment\nonce more the deadline came late again\n")


def write_checkpoint(folder: Path) -> None:
    """A GPT-2 with random weights and a tokenizer, as `save_pretrained` writes it, and a text."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (folder / "book.txt").write_text(text, encoding="utf-8")
    code = f"""
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast
torch.manual_seed(0)
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([{text!r}], vocab_size=400, special_tokens=["<|endoftext|>"])
bpe.save("tokenizer.json")
tokenizer = GPT2TokenizerFast(tokenizer_file="tokenizer.json")
config = GPT2Config(
    vocab_size=len(tokenizer), n_positions=512, n_embd=64, n_layer=2, n_head=2,
    bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
)
GPT2LMHeadModel(config).save_pretrained("downloads/gpt2")
tokenizer.save_pretrained("downloads/gpt2")
"""
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)


def write_module(folder: Path) -> None:
    """The class of docs/honest.md, whose mask is of the wrong type, and a call of it in words of version 0.2.0."""
    page = (ROOT / "docs" / "honest.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    (folder / "model.py").write_text(code, encoding="utf-8")
    (folder / "check_it.py").write_text(
        "import manyformer as mf\nfrom manyformer.check import Adapter\nfrom model import GPT\n\nnet = GPT(256)\n"
        "report = mf.check(Adapter(logits=lambda tokens: net(tokens), vocab=256, module=net))\nprint(report)\n"
    )


def write_nothing(folder: Path) -> None:
    """A lecturer has nothing."""


LABELS = "docs/how-to/label-texts.md"
CONVERT = "docs/how-to/convert-a-checkpoint.md"
START = "docs/start.md"

USERS = (
    User(
        "a student with a CSV",
        "labels of new texts by a classifier of one's own table, and its accuracy",
        5,
        write_table,
        (
            Step("manyformer train classify/intents data.path=reviews.csv --dry-run", LABELS, ("food", "work")),
            Step(
                "manyformer train classify/intents data.path=reviews.csv out=runs/labels",
                LABELS,
                ("done", "means"),
                fast="limits.steps=20",
            ),
            Step("manyformer predict runs/labels new.txt --top 3", LABELS, ("food", "work")),
            Step("manyformer evaluate runs/labels --data other.csv", LABELS, ("accuracy",)),
        ),
    ),
    User(
        "an engineer with a checkpoint",
        "a checkpoint of transformers read, tried, scored on one's own text, and given a window",
        8,
        write_checkpoint,
        (
            Step("manyformer check downloads/gpt2", CONVERT, ("causal", "passed"), fast="--only causal,cached"),
            Step("manyformer import downloads/gpt2 --out models/gpt2", CONVERT, ("models/gpt2",)),
            Step('manyformer generate models/gpt2 "The"', CONVERT),
            Step("manyformer evaluate models/gpt2 --data book.txt", CONVERT, ("bits per byte",)),
            Step(
                "manyformer convert models/gpt2 kernel=window window=256 --out models/gpt2-window",
                CONVERT,
                ("manyformer ",),
            ),
        ),
    ),
    User(
        "a lecturer",
        "a trained model, its curves, its attention in a page, and the picture of a mask",
        5,
        write_nothing,
        (
            Step("manyformer train lm/stdlib", START, ("means", "curves.png"), fast="limits.steps=12 data.valid=0.01"),
            Step('manyformer view runs/lm-stdlib "def add(a, b):" --out page.html', START, ("page.html",)),
            Step("manyformer show longformer-lm --pattern", "docs/inside.md", ("tokens",)),
        ),
    ),
    User(
        "the owner of a leaking model",
        "the line that leaks",
        3,
        write_module,
        (Step("manyformer check model.py:GPT", "docs/honest.md", ("causal", "failed", "model.py:14"), code=1),),
    ),
)

RELEASED = Step(
    "manyformer check routing_transformer:RoutingTransformerLM causal=true --only causal --html leak.html",
    "README.md",
    ("the future leaks", "routing_transformer.py:86"),
    code=1,
)
"""What the owner of a leak does with a released package, where it is installed."""

DATA_BEFORE = "docs/how-to/own-data.md"
BEFORE = (
    User(
        USERS[0].name,
        USERS[0].goal,
        5,
        write_table,
        (
            Step("manyformer train transformer-classifier data.path=reviews.tsv --dry-run", DATA_BEFORE, ("food",)),
            Step(
                "manyformer train transformer-classifier data.path=reviews.tsv limits.minutes=10 out=runs/labels",
                DATA_BEFORE,
                ("done",),
                seconds=120,
            ),
            Step("manyformer predict runs/labels new.txt --top 3", "README.md", ("food", "work")),
            Step("manyformer evaluate runs/labels --data other.txt", DATA_BEFORE, ("accuracy",)),
        ),
    ),
    User(
        USERS[1].name,
        USERS[1].goal,
        8,
        write_checkpoint,
        (
            Step("manyformer import downloads/gpt2 --out models/gpt2", CONVERT, ("models/gpt2",)),
            Step('manyformer generate models/gpt2 "The"', CONVERT),
            Step("manyformer check models/gpt2", "docs/hugging-face.md", ("causal", "passed")),
            Step("manyformer evaluate downloads/gpt2 --data book.txt", "docs/hugging-face.md", ("bits per byte",)),
            Step(
                "manyformer convert models/gpt2 kernel=window window=256 --out models/gpt2-window",
                CONVERT,
                ("manyformer ",),
            ),
        ),
    ),
    User(
        USERS[2].name,
        USERS[2].goal,
        5,
        write_nothing,
        (
            Step("manyformer train lm/stdlib", START, ("curves.png",)),
            Step('manyformer view runs/lm-stdlib "def add(a, b):" --out page.html', START, ("page.html",)),
            Step("manyformer show longformer-lm --pattern", "README.md", ("tokens",)),
        ),
    ),
    User(
        USERS[3].name,
        USERS[3].goal,
        3,
        write_module,
        (
            Step("manyformer check model.py:GPT", "docs/check.md", ("causal", "failed", "model.py:14"), code=1),
            Step("python check_it.py", "docs/check.md", ("causal", "failed", "model.py:14")),
        ),
    ),
)
"""The same people with the pages of version 0.2.0, which has no command for a module of one's own: it is called through
an adapter, as its page says, in a file of seven lines."""


def words_of(text: str) -> int:
    return len(text.split())


def read_sections(page: Path, commands: list[str]) -> int:
    """The words of the sections of a page in which the commands stand, without blocks of code."""
    sections = re.split(r"(?m)^## ", page.read_text(encoding="utf-8"))
    chosen = [section for section in sections if any(command in section for command in commands)]
    return sum(words_of(re.sub(r"(?ms)^ *```.*?^ *```$", "", section)) for section in chosen)


def up_to_the_answer(lines: list[str], says: tuple[str, ...]) -> list[str]:
    """The lines up to the one that answers, which says the last of `says`; all without it."""
    answer = next((number for number, line in enumerate(lines, 1) if says and says[-1] in line), len(lines))
    return lines[:answer]


def words_to_read(lines: list[str], read: set[str]) -> int:
    """The words of lines that were not read yet: one that differs from an earlier one in numbers alone is none."""
    count = 0
    for line in lines:
        # a dry run marks what the training says too
        plain = re.sub(r"\d[\d.,:e-]*", "0", line.removeprefix("# "))
        if plain not in read:
            count += words_of(line)
        read.add(plain)
    return count


def run_step(step: Step, folder: Path, tree: Path, read: set[str], *, fast: bool, is_last: bool) -> dict[str, Any]:
    """Run a command as it was typed, and say how it ended, what it said and what was missing."""
    typed = f"{step.command} {step.fast}".strip() if fast else step.command
    shell = typed.replace("manyformer ", f"{sys.executable} -m manyformer ", 1)
    shell = re.sub(r"^python ", f"{sys.executable} ", shell)
    site = folder / ".site"
    site.mkdir(exist_ok=True)
    # the last word on the path, after files that an installation may have put there
    (site / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(tree.resolve() / 'src')!r})\n")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "80", "LINES": "50"}
    start = time.monotonic()
    # a group of its own, because the signal must reach the command and not the shell alone
    limit = [] if step.seconds is None else ["timeout", "--signal=INT", f"{step.seconds:g}"]
    ended = subprocess.run(
        [*limit, "bash", "-c", f"exec {shell}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - start
    text = ended.stdout + ended.stderr
    # progress that overwrites itself is one line
    lines = [line.rpartition("\r")[2] for line in text.splitlines()]
    missing = [words for words in step.says if words not in text]
    faults = [f"it does not say {words!r}" for words in missing]
    if "Traceback" in text:
        faults.append("it ends in a traceback")
    # 124: it was ended as Ctrl-C does
    if ended.returncode != step.code:
        faults.append(f"exit code {ended.returncode}, not {step.code}")
    print(f"  {typed}: {seconds:.1f} s, {words_of(text)} words, {'; '.join(faults) or 'as the page says'}", flush=True)
    if faults:
        print(text, file=sys.stderr, flush=True)
    return {
        "command": typed,
        "page": step.page,
        "code": ended.returncode,
        "seconds": round(seconds, 1),
        "words": words_of(text),
        "words_read": words_to_read(up_to_the_answer(lines, step.says) if is_last else lines, read),
        "faults": faults,
        "text": shortened(lines),
    }


def shortened(lines: list[str]) -> list[str]:
    """The lines of a text, of a long one the first and the last."""
    if len(lines) <= MOST_LINES:
        return lines
    half = MOST_LINES // 2
    return [*lines[:half], f"... {len(lines) - MOST_LINES} lines ...", *lines[-half:]]


def go(user: User, tree: Path, *, fast: bool = False) -> dict[str, Any]:
    """What a user does in a fresh folder, with the minutes of own time and of the machine."""
    print(user.name, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="first-minutes-"))
    try:
        user.prepare(folder)
        read: set[str] = set()
        steps = [run_step(step, folder, tree, read, fast=fast, is_last=step is user.steps[-1]) for step in user.steps]
    finally:
        shutil.rmtree(folder)
    for step in user.steps:
        is_own = step.command.startswith("python ")
        if not is_own and step.command not in (tree / step.page).read_text(encoding="utf-8"):
            steps[user.steps.index(step)]["faults"].append(f"{step.page} has another command")
    pages = {step.page: [other.command for other in user.steps if other.page == step.page] for step in user.steps}
    page_words = sum(read_sections(tree / page, commands) for page, commands in pages.items())
    printed = sum(step["words_read"] for step in steps)
    typed = sum(len(step["command"]) for step in steps)
    own = (page_words + printed) / WORDS_A_MINUTE + typed / CHARACTERS_A_MINUTE
    return {
        "user": user.name,
        "goal": user.goal,
        "most_own_minutes": user.minutes,
        "commands": len(steps),
        "page_words": page_words,
        "printed_words": printed,
        "typed_characters": typed,
        "own_minutes": round(own, 1),
        "machine_minutes": round(sum(step["seconds"] for step in steps) / 60, 1),
        "reached": not any(step["faults"] for step in steps),
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="the smallest trainings; nothing is written")
    parser.add_argument("--before", type=Path, help="the tree of version 0.2.0, whose pages and package are tried")
    parser.add_argument("--packages", help="a folder of installed packages with routing_transformer")
    parser.add_argument("--only", nargs="+", help="words in the names of the users that are tried")
    arguments = parser.parse_args()
    users = BEFORE if arguments.before else USERS
    if arguments.packages and not arguments.before:
        os.environ["PYTHONPATH"] = arguments.packages
        users = (*users[:-1], users[-1]._replace(steps=(*users[-1].steps, RELEASED)))
    chosen = [user for user in users if not arguments.only or any(word in user.name for word in arguments.only)]
    tried = [go(user, arguments.before or ROOT, fast=arguments.fast) for user in chosen]
    for user in tried:
        minutes = f"{user['own_minutes']} own minutes of {user['most_own_minutes']}"
        print(f"{user['user']}: {user['commands']} commands, {minutes}")
    if not arguments.fast:
        record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
        column = "before" if arguments.before else "now"
        kept = {user["user"]: user for user in [*record.get(column, {}).get("users", []), *tried]}
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        order = [user.name for user in USERS]
        ordered = sorted(kept.values(), key=lambda user: order.index(user["user"]))
        record[column] = {"machine": machine, "load": round(os.getloadavg()[0], 1), "users": ordered}
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if not arguments.before and not all(user["reached"] for user in tried):
        sys.exit(1)


if __name__ == "__main__":
    main()
