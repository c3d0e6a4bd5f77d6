"""Output of generated text: streamed, complete, or as JSON lines."""

import json
from itertools import zip_longest
from typing import Any, TextIO

from manyformer.generate import BeamSettings, Decoding, GenerationResult, GenerationStats, StreamPiece, generate


class TextOutput:
    """Generates from prompts and writes the texts to a stream; afterwards `stats` has speed and cache size."""

    def __init__(self, model: Any, decoding: Decoding, out: TextIO, *, as_json: bool) -> None:
        self.model, self.decoding, self.out, self.as_json = model, decoding, out, as_json
        self.stats: GenerationStats | None = None
        self.echo = ""

    def write(self, prompts: list[str]) -> None:
        """Generate for all prompts; a single text is streamed."""
        single = len(prompts) == 1 and getattr(self.decoding.choice, "samples", 1) == 1
        if single and not self.as_json and not isinstance(self.decoding.choice, BeamSettings):
            # echoed with the first piece, so that a rejected prompt is not echoed
            self.echo = prompts[0]
            result = generate(self.model, prompts, decoding=self.decoding, on_piece=self._write_piece)
            self._write_out(f"{self.echo}\n")
        else:
            result = generate(self.model, prompts, decoding=self.decoding)
            self._write_result(prompts, result)
        self.stats = result.stats

    def _write_piece(self, piece: StreamPiece) -> None:
        echo, self.echo = self.echo, ""
        self._write_out(echo + piece.text)

    def _write_out(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()

    def _write_result(self, prompts: list[str], result: GenerationResult) -> None:
        texts = [(prompt, answer) for prompt, answers in zip(prompts, result.rows) for answer in answers]
        for number, ((prompt, answer), seed) in enumerate(zip_longest(texts, result.seeds), 1):
            if self.as_json:
                record = {"prompt": prompt, **answer._asdict(), "seed": seed}
                self._write_out(json.dumps(record, ensure_ascii=False) + "\n")
                continue
            if len(texts) > 1:
                labels = [f"text {number}", *([] if seed is None else [f"seed {seed}"])]
                labels += [] if answer.score is None else [f"score {answer.score:.3f}"]
                self._write_out(f"--- {', '.join(labels)}\n")
            self._write_out(f"{prompt}{answer.text}\n")
