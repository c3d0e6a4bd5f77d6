"""`manyformer translate`: translate text line by line."""

import sys
from itertools import tee
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_note, print_text
from manyformer.cli.decoding_arguments import decoding_option
from manyformer.cli.model_arguments import load_translator
from manyformer.cli.prompt_input import read_lines, typed_lines
from manyformer.cli.shared_options import CalibrationOption, DeviceOption, JsonLinesOption, RunArgument, StatsOption
from manyformer.decoding_options import StepPath
from manyformer.errors import UserError
from manyformer.files.json_text import json_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from manyformer.generate import Hypothesis


@command(
    USE,
    'manyformer translate runs/translate-normalization "3 March 1998"',
    "manyformer translate runs/translate-multi30k --input test.en > test.out",
    "cat test.en | manyformer translate runs/translate-multi30k --beam 8 --n-best 3",
    "manyformer translate runs/calm --beam 1 --calibration runs/calm/calibration.json --input test.en",
)
def translate(
    run: RunArgument,
    text: Annotated[
        str | None,
        Argument(
            help="The text to translate; '-' or a pipe reads lines from standard input, a terminal asks for them."
        ),
    ] = None,
    *,
    file: Annotated[str | None, Option("--input", "-i", help="Translate each line of this file.")] = None,
    n_best: Annotated[int, Option(min=1, help="Print the N best of the beam, with line number and score.")] = 1,
    beam: Annotated[int, decoding_option("beam")] = 4,
    length_penalty: Annotated[float, decoding_option("length_penalty")] = 0.6,
    max_new: Annotated[int | None, decoding_option("max_new")] = None,
    step_path: Annotated[StepPath | None, decoding_option("step_path")] = None,
    calibration: CalibrationOption = None,
    device: DeviceOption = None,
    stats: StatsOption = False,
    as_json: JsonLinesOption = False,
) -> None:
    """Translate a text, a file or standard input with a trained encoder-decoder, one line at a time, in order.

    An empty line stays empty.
    """
    from manyformer.generate import decoding_from_options

    if text is not None and file is not None:
        raise UserError("give either a text or --input, not both")
    decoding = decoding_from_options(
        beam=beam, length_penalty=length_penalty, best=n_best, max_new=max_new, step_path=step_path
    )
    translator = load_translator(run, decoding, device, calibration)
    if file is None and text is None and sys.stdin.isatty():
        print_note("one line at a time; Ctrl-D ends")
        translations: Iterable[tuple[str, tuple[Hypothesis, ...]]] = (
            (line, next(translator([line]))) for line in typed_lines("> ")
        )
    else:
        # the translator reads ahead, so its lines are a copy
        sources, lines = tee([text] if text not in (None, "-") else read_lines(file or "-"))
        translations = zip(lines, translator(sources))
    for number, (line, answers) in enumerate(translations, 1):
        print_text(_text(number, line, answers, n_best, as_json=as_json))
    if stats:
        print_note(str(translator.stats))


def _text(number: int, source: str, answers: "tuple[Hypothesis, ...]", n_best: int, *, as_json: bool) -> str:
    """The translations of line `number`: JSON, the best one, or all with the line's number and their scores."""
    if as_json:
        records = [{"text": answer.text, "score": answer.score, "finish": answer.finish} for answer in answers]
        return json_text({"source": source, "answers": records})
    if n_best == 1:
        return answers[0].text or ""
    scores = ["" if answer.score is None else f"{answer.score:.4f}" for answer in answers]
    return "\n".join(f"{number}\t{score}\t{answer.text}" for score, answer in zip(scores, answers))
