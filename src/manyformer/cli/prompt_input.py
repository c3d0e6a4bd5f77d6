"""Reading prompts from the command line, a pipe, a file or a terminal."""

import sys
from collections.abc import Iterator

from manyformer.cli.console import print_note
from manyformer.errors import UserError

MAX_PROMPT_BYTES = 1 << 26
"""The largest text from standard input, or all lines of it, that is taken for prompts."""


def read_prompts(prompt: str | None, *, lines: bool) -> list[str]:
    """The prompts of `generate`: the one on the command line, or standard input as a whole or line by line.

    Without either: one empty prompt. Lines end as those of files do; empty ones are no prompts, and a note says how
    many there were. Raises UserError for `lines` without standard input and for bytes that are not UTF-8.
    """
    from manyformer.data.text_files import split_lines, without_line_end

    is_piped = prompt == "-" or (prompt is None and not sys.stdin.isatty())
    if lines and not is_piped:
        raise UserError("--lines reads prompts from standard input: pipe them in, or give '-' as the prompt")
    if not is_piped:
        return ["" if prompt is None else prompt]
    text = read_text()
    if not lines:
        return [without_line_end(text)]
    all_lines = split_lines(text)
    prompts = [line for line in all_lines if line]
    if not prompts:
        raise UserError("standard input has no non-empty line")
    if len(prompts) < len(all_lines):
        empty = len(all_lines) - len(prompts)
        first = all_lines.index("") + 1
        print_note(f"{empty:,} empty line{'s' * (empty > 1)} of standard input (first: line {first:,}) left out")
    return prompts


def read_argument(text: str) -> str:
    """A text on the command line, or all of standard input for "-". Raises UserError for bytes that are not UTF-8."""
    from manyformer.data.text_files import without_line_end

    if text == "-":
        return without_line_end(read_text())
    return text


def read_text() -> str:
    """All of standard input as text. Raises UserError for more than `MAX_PROMPT_BYTES`."""
    from manyformer.data.text_files import decode_text

    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise UserError(f"standard input has more than {MAX_PROMPT_BYTES:,} bytes, which is too much for prompts")
    return decode_text(data, "standard input", "FILE")


def read_lines(name: str) -> Iterator[str]:
    """The lines of a file, or of standard input where the name is '-', one at a time. Raises UserError without any."""
    from manyformer.data import text_files
    from manyformer.data.data_paths import stdin_lines

    if name == "-":
        yield from stdin_lines()
        return
    lines = text_files.read_lines(text_files.existing_path(name))
    first = next(lines, None)
    if first is None:
        raise UserError(f"{name}: there is no line in it")
    yield first.text
    yield from (line.text for line in lines)


def typed_lines(prompt: str) -> Iterator[str]:
    """Lines typed at a terminal, until the end of input (Ctrl-D)."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return
