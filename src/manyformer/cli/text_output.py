"""Output of generated text: streamed, complete, or as JSON lines."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, TextIO

from manyformer.cli.console import print_text
from manyformer.files.json_text import json_text
from manyformer.generate import BeamSettings, Decoding, GenerationResult, GenerationStats, generate


def write_texts(model: Any, prompts: list[str], decoding: Decoding, out: TextIO, *, as_json: bool) -> GenerationStats:
    """Generate for all prompts and write the texts to a stream; returns speed and cache size.

    A single text is streamed while it is generated.
    """
    is_single = len(prompts) == 1 and getattr(decoding.choice, "samples", 1) == 1
    if not is_single or as_json or isinstance(decoding.choice, BeamSettings):
        result = generate(model, prompts, decoding=decoding)
        for line in _output_lines(prompts, result, as_json=as_json):
            print_text(line, file=out)
        return result.stats
    # echoed with the first piece, so that a rejected prompt is not echoed
    echo = iter(prompts)

    def write(text: str) -> None:
        print_text(next(echo, "") + text, end="", file=out)

    result = generate(model, prompts, decoding=decoding, on_piece=lambda piece: write(piece.text))
    write("\n")
    return result.stats


def _output_lines(prompts: list[str], result: GenerationResult, *, as_json: bool) -> Iterator[str]:
    texts = [(prompt, answer) for prompt, answers in zip(prompts, result.rows) for answer in answers]
    for number, ((prompt, answer), seed) in enumerate(zip_longest(texts, result.seeds), 1):
        if as_json:
            yield json_text({"prompt": prompt, **answer._asdict(), "seed": seed})
            continue
        if len(texts) > 1:
            labels = [f"text {number}", *([] if seed is None else [f"seed {seed}"])]
            labels += [] if answer.score is None else [f"score {answer.score:.3f}"]
            yield f"--- {', '.join(labels)}"
        yield f"{prompt}{answer.text}"
