"""`manyformer translate`: translate text line by line."""

import json
import sys
from itertools import tee
from typing import TYPE_CHECKING, Annotated

import typer

from manyformer.cli.app import USE, DeviceOption, app, examples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from manyformer.generate import Hypothesis, Translator


@app.command(
    "translate",
    rich_help_panel=USE,
    epilog=examples(
        'manyformer translate runs/translate-normalization "3 March 1998"',
        "manyformer translate runs/translate-multi30k --input test.en > test.out",
        "cat test.en | manyformer translate runs/translate-multi30k --beam 8 --n-best 3",
    ),
)
def translate(
    run: Annotated[str, typer.Argument(help="The folder of a run or a saved model.")],
    text: Annotated[
        str | None,
        typer.Argument(
            help="The text to translate; '-' or a pipe reads lines from standard input, a terminal prompts for them."
        ),
    ] = None,
    *,
    file: Annotated[str | None, typer.Option("--input", "-i", help="Translate each line of this file.")] = None,
    beam: Annotated[int, typer.Option(min=1, help="Beam width; 1 is greedy decoding.")] = 4,
    length_penalty: Annotated[
        float, typer.Option(help="Length penalty (Wu et al. 2016): larger values favor longer translations.")
    ] = 0.6,
    n_best: Annotated[
        int, typer.Option(min=1, help="Print the N best of the beam, each with its line number and score.")
    ] = 1,
    max_new: Annotated[
        int | None, typer.Option(min=1, help="At most this many tokens; source + 50 unless given.")
    ] = None,
    device: DeviceOption = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print the speed to stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each line.")] = False,
) -> None:
    """Translate a text, a file or standard input with a trained encoder-decoder, one line at a time, in order.

    An empty line stays empty.
    """
    from manyformer.cli.console import print_note
    from manyformer.cli.model_arguments import load_translator
    from manyformer.cli.prompt_input import read_lines, typed_lines
    from manyformer.errors import UserError
    from manyformer.generate import decoding_from_options

    if text is not None and file is not None:
        raise UserError("give either a text or --input, not both")
    decoding = decoding_from_options(beam=beam, length_penalty=length_penalty, best=n_best, max_new=max_new)
    translate_lines = load_translator(run, decoding, device)
    print_answers = _TranslationPrinter(n_best, as_json=as_json)
    if file is None and text is None and sys.stdin.isatty():
        print_note("one line at a time; Ctrl-D ends")
        for line in typed_lines("> "):
            print_answers(line, next(translate_lines([line])))
    else:
        name = "-" if file is None else file
        sources = read_lines(name) if text in (None, "-") else [str(text)]
        for line, answers in _with_answers(translate_lines, sources):
            print_answers(line, answers)
    if stats:
        print_note(str(translate_lines.stats))


def _with_answers(
    translate_lines: "Translator", sources: "Iterable[str]"
) -> "Iterator[tuple[str, tuple[Hypothesis, ...]]]":
    """Each line with its translations; lines are read ahead only as far as the translator needs."""
    lines, lines_to_translate = tee(sources)
    return zip(lines, translate_lines(lines_to_translate))


class _TranslationPrinter:
    """Prints translations line by line."""

    def __init__(self, n_best: int, *, as_json: bool) -> None:
        self.n_best, self.as_json, self.number = n_best, as_json, 0

    def __call__(self, source: str, answers: "tuple[Hypothesis, ...]") -> None:
        self.number += 1
        if self.as_json:
            records = [{"text": answer.text, "score": answer.score, "finish": answer.finish} for answer in answers]
            print(json.dumps({"source": source, "answers": records}, ensure_ascii=False), flush=True)
        elif self.n_best == 1:
            print(answers[0].text, flush=True)
        else:
            for answer in answers:
                score = "" if answer.score is None else f"{answer.score:.4f}"
                print(f"{self.number}\t{score}\t{answer.text}", flush=True)
