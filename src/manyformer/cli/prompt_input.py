"""Reading prompts from the command line, a pipe, a file or a terminal."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

from manyformer.errors import UserError


def read_prompts(prompt: str | None, *, lines: bool) -> list[str]:
    """The prompts of `generate`: the one on the command line, or standard input as a whole or line by line.

    Without either: one empty prompt. Raises UserError for `lines` without standard input and for bytes that are not
    UTF-8.
    """
    is_piped = prompt == "-" or (prompt is None and not sys.stdin.isatty())
    if lines and not is_piped:
        raise UserError("--lines reads prompts from standard input: pipe them in, or give '-' as the prompt")
    if not is_piped:
        return ["" if prompt is None else prompt]
    text = read_text()
    if not lines:
        return [text.removesuffix("\n")]
    prompts = [line for line in text.splitlines() if line]
    if not prompts:
        raise UserError("standard input has no non-empty line")
    return prompts


def read_text() -> str:
    """All of standard input as text."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from error


def read_lines(name: str) -> Iterator[str]:
    """The lines of a file, or of standard input where the name is '-', one at a time."""
    with ExitStack() as stack:
        handle = sys.stdin.buffer if name == "-" else stack.enter_context(open(name, "rb"))
        for number, line in enumerate(handle, 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{name}, line {number}: this is not UTF-8 ({error.reason})") from error


def typed_lines(prompt: str) -> Iterator[str]:
    """Lines typed at a terminal, until the end of input (Ctrl-D)."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return
