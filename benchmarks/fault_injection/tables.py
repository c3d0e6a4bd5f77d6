"""Odd tables and treebanks: every row is read as a plain reader reads it, or a sentence says which is not."""

import csv
import io
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import conllu

from fault_injection import scenarios
from fault_injection.forked_commands import CommandResult
from fault_injection.outcomes import NotRun, Trial, judge
from fault_injection.scenarios import Command
from fault_injection.workshop import Workshop

FAMILY = "tables"
PLACE = (
    r"(?i:\b(line|row|record|sentence|example|text)s? ?\d|:\d+"
    r"|\d[\d,]* (line|row|record|cell|text|sentence|word))"
)
"""A sentence about a row that was not read as it stands says which one, or how many."""

Rows = list[tuple[str, str]]


def plain_rows(chance: random.Random, count: int = 120) -> Rows:
    """Texts and their labels."""
    texts = [chance.choices(scenarios.WORDS, k=chance.randint(2, 6)) for _ in range(count)]
    return [(" ".join(words), "asks" if "question" in words else "tells") for words in texts]


@dataclass(frozen=True)
class Oddity:
    """A way in which a table is odd, and what a table of that form has for rows, None if it cannot be read."""

    deed: str
    rows: Callable[[Rows, random.Random], Rows] = lambda rows, chance: rows
    encode: Callable[[bytes], bytes] = lambda content: content
    header: bool = False
    is_readable: bool = True
    is_readable_in_json: bool = False
    """Whether it can be read where the cell is a text of JSON, which has signs of its own for it."""


def _with_text(text: str) -> Callable[[Rows, random.Random], Rows]:
    """One text in the place of that of a random row."""

    def change(rows: Rows, chance: random.Random) -> Rows:
        place = chance.randrange(1, len(rows))
        return [*rows[:place], (text, rows[place][1]), *rows[place + 1 :]]

    return change


def _with_label(label: str) -> Callable[[Rows, random.Random], Rows]:
    def change(rows: Rows, chance: random.Random) -> Rows:
        place = chance.randrange(1, len(rows))
        return [*rows[:place], (rows[place][0], label), *rows[place + 1 :]]

    return change


def _insert(line: bytes) -> Callable[[bytes], bytes]:
    """A line in the middle that is no row of the table."""

    def change(content: bytes) -> bytes:
        lines = content.splitlines(keepends=True)
        return b"".join([*lines[:50], line + b"\n", *lines[50:]])

    return change


ODDITIES = (
    Oddity("nothing odd"),
    Oddity("a header", header=True),
    Oddity("a byte order mark", encode=lambda content: b"\xef\xbb\xbf" + content),
    Oddity("a byte order mark and a header", encode=lambda content: b"\xef\xbb\xbf" + content, header=True),
    Oddity("lines that end with a return too", encode=lambda content: content.replace(b"\n", b"\r\n")),
    Oddity("no end of the last line", encode=lambda content: content.rstrip(b"\r\n")),
    Oddity("a cell of two lines", rows=_with_text("to be\nor not")),
    Oddity("a cell of a hundred lines", rows=_with_text("\n".join(["to be"] * 100))),
    Oddity("quotes in a cell", rows=_with_text('to "be" or')),
    Oddity("a comma and a tab in a cell", rows=_with_text("to, be\tor")),
    Oddity("a line separator in a cell", rows=_with_text("to be\u2028or not")),
    Oddity("a form feed in a cell", rows=_with_text("to be\x0cor not")),
    Oddity("a next-line sign in a cell", rows=_with_text("to be\x85or not")),
    Oddity("spaces around a cell", rows=_with_text(" to be ")),
    Oddity("signs beyond the basic plane", rows=_with_text("to \U0001f600 e\u0301")),
    Oddity("a cell of a million letters", rows=_with_text("to be " * 170_000)),
    Oddity("an empty text", rows=_with_text("")),
    Oddity("an empty label", rows=_with_label("")),
    Oddity("the label of one row alone", rows=_with_label("murmurs")),
    Oddity("the same row ten times", rows=lambda rows, chance: rows + rows[:1] * 10),
    Oddity("a NUL in a cell", rows=_with_text("to\0be"), is_readable=False, is_readable_in_json=True),
    Oddity("a blank line", encode=_insert(b"")),
    Oddity("a row of one cell", encode=_insert(b"alone"), is_readable=False),
    Oddity("a row of five cells", encode=_insert(b"a\tb\tc\td\te"), is_readable=False),
    Oddity("an open quote", encode=_insert(b'"to be\tasks'), is_readable=False),
    Oddity("UTF-16", encode=lambda content: content.decode().encode("utf-16"), is_readable=False),
    Oddity(
        "Latin-1",
        rows=_with_text("caf\xe9"),
        encode=lambda content: content.decode().encode("latin-1", "replace"),
        is_readable=False,
    ),
    Oddity("no rows", encode=lambda content: b"", is_readable=False),
    Oddity("one row", rows=lambda rows, chance: rows[:1]),
)
FORMS = ("csv", "tsv", "jsonl")


def encoded(rows: Rows, form: str, *, header: bool) -> bytes:
    """The rows in a table of this form, as the library that everybody has writes them."""
    if form == "jsonl":
        return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows).encode()
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter="," if form == "csv" else "\t", lineterminator="\n")
    writer.writerows([*([("text", "label")] if header else []), *rows])
    return stream.getvalue().encode()


def in_quotes(text: str) -> str:
    """A text as a TSV has it, in which quotes are characters: with those that a writer of CSV puts around it."""
    return '"' + text.replace('"', '""') + '"' if '"' in text else text


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """An odd table that a classifier predicts or learns from, or an odd treebank that a tagger reads."""
    if number % 4 == 3:
        return _treebank(workshop, number)
    chance, turn = workshop.chance(FAMILY, number), number // 4
    oddity, form = ODDITIES[turn % len(ODDITIES)], FORMS[number % 4]
    rows = oddity.rows(plain_rows(chance), chance)
    content = oddity.encode(encoded(rows, form, header=oddity.header))
    workshop.set_up(scenarios.LABELS, finished=True)
    name = f"odd.{form}"
    (workshop.here / name).write_bytes(content)
    learns = chance.random() < 0.5
    command: Command = ("predict", "run", name, "--json")
    if learns:
        settings = {
            "data.path=labels.tsv": f"data.path={name}",
            "out=run": "out=new",
            "limits.steps=12": "limits.steps=1",
        }
        command = tuple(settings.get(word, word) for word in scenarios.LABELS.command)
    began = time.monotonic()
    result = workshop.run(command)
    wanted = [row for row in rows if all(cell.strip() for cell in row)]
    same: bool | None = None
    is_readable = oddity.is_readable or (form == "jsonl" and oddity.is_readable_in_json)
    if result.code == 0 and not is_readable:
        same = False
    elif result.code == 0 and learns:
        labels = json.loads((workshop.here / "new/model/labels.json").read_text())
        same = set(labels) == {label for _, label in wanted} and len(wanted) == len(rows)
    elif result.code == 0:
        same = _inputs(result) == [(in_quotes(text) if form == "tsv" else text).strip() for text, _ in rows]
    outcome, detail = judge(result, {name}, same=same, place=rf"{name}[\s\S]*({PLACE})")
    if result.code == 2 and oddity.deed in ("nothing odd", "a header", "a byte order mark"):
        outcome, detail = "unnamed", f"an ordinary table is refused: {detail}"
    deed = f"{form}: {oddity.deed}"
    return Trial(FAMILY, number, deed, outcome, str(result), detail, time.monotonic() - began)


def _inputs(result: CommandResult) -> list[Any]:
    """The texts that labels were predicted for."""
    # splitlines would also cut at the signs of Unicode that stand in cells
    lines = result.output.split("\n")
    return [str(json.loads(line)["input"]).strip() for line in lines if line.startswith("{")]


def _block(words: list[str]) -> str:
    rows = [
        f"{n}\t{word}\t_\tX\t_\t_\t{n - 1}\t{'root' if n == 1 else 'is-be'}\t_\t_\n" for n, word in enumerate(words, 1)
    ]
    return "".join(rows) + "\n"


PLAIN = _block(["to", "be", "or", "not"])
TREEBANKS: dict[str, str] = {
    "nothing odd": PLAIN,
    "an empty FORM": PLAIN.replace("\tor\t", "\t\t"),
    "a FORM of spaces": PLAIN.replace("\tor\t", "\t  \t"),
    "a FORM with a space": PLAIN.replace("\tor\t", "\tor so\t"),
    "a FORM of a sign without width": PLAIN.replace("\tor\t", "\t\u200b\t"),
    "a sentence of 20,000 words": _block(["be"] * 20_000),
    "a word of a million letters": PLAIN.replace("\tor\t", f"\t{'o' * 1_000_000}\t"),
    "a range of words": PLAIN.replace("2\tbe", "2-3\tbeor\t_\t_\t_\t_\t_\t_\t_\t_\n2\tbe"),
    "an empty node": PLAIN.replace("3\tor", "2.1\tgone\t_\tX\t_\t_\t_\t_\t_\t_\n3\tor"),
    "comments": f"# sent_id = 1\n# text = to be or not\n{PLAIN}",
    "returns": PLAIN.replace("\n", "\r\n"),
    "nine columns": PLAIN.replace("\t_\t_\n", "\t_\n"),
    "a head beyond the sentence": PLAIN.replace("\t3\tis-be", "\t30\tis-be"),
    "a head that is no number": PLAIN.replace("\t3\tis-be", "\tx\tis-be"),
    "a head below zero": PLAIN.replace("\t3\tis-be", "\t-3\tis-be"),
    "a circle of heads": PLAIN.replace("\t0\troot", "\t2\troot"),
    "numbers that jump": PLAIN.replace("3\tor", "7\tor"),
    "a huge number": PLAIN.replace("3\tor", f"{10**30}\tor"),
    "a NUL": PLAIN.replace("\tor\t", "\to\0r\t"),
    "a byte order mark": f"\ufeff{PLAIN}",
    "no blank line at the end": PLAIN.rstrip("\n"),
    "ten blank lines": PLAIN + "\n" * 10,
    "no relation": PLAIN.replace("is-be", "_"),
    "a new relation": PLAIN.replace("is-be", "nsubj:pass"),
    "nothing": "",
}
ORDINARY = ("nothing odd", "comments", "returns", "a byte order mark", "a range of words", "no blank line at the end")


def _treebank(workshop: Workshop, number: int) -> Trial:
    """A treebank whose words are tagged, or which a tagger learns from together with many plain sentences."""
    chance = workshop.chance(FAMILY, number)
    deed = sorted(TREEBANKS)[number // 4 % len(TREEBANKS)]
    content = TREEBANKS[deed]
    workshop.set_up(scenarios.TREES, finished=True)
    name = "odd.conllu"
    learns = chance.random() < 0.4
    plain = (workshop.here / "trees.conllu").read_text()
    (workshop.here / name).write_text(content + plain if learns and content else content, newline="")
    command: Command = ("predict", "run", name, "--json")
    if learns:
        paths = {f"data.{part}=trees.conllu": f"data.{part}={name}" for part in ("path", "valid", "test")}
        settings = {**paths, "out=run": "out=new", "limits.steps=12": "limits.steps=1"}
        command = tuple(settings.get(word, word) for word in scenarios.TREES.command)
    began = time.monotonic()
    result = workshop.run(command)
    same: bool | None = None
    if result.code == 0 and not learns:
        same = len([line for line in result.output.splitlines() if line.startswith("{")]) == _sentences(content)
    outcome, detail = judge(result, {name}, same=same, place=rf"{name}[\s\S]*({PLACE})")
    if result.code == 2 and deed in ORDINARY:
        outcome, detail = "unnamed", f"an ordinary treebank is refused: {detail}"
    return Trial(FAMILY, number, f"treebank: {deed}", outcome, str(result), detail, time.monotonic() - began)


def _sentences(content: str) -> int:
    """How many sentences the package conllu finds; those that it cannot read count too."""
    try:
        return len(conllu.parse(content.removeprefix("\ufeff").replace("\r\n", "\n")))
    except Exception:
        return -1
