"""Text from a model to a stream: as it is written, or whole, or as JSON lines."""

import json
from typing import Any, TextIO

from manyformer.generate import BeamSettings, Decoding, GenerationResult, GenerationStats, StreamPiece, generate


class TextOutput:
    """Writes answers to prompts; `stats` says afterwards what it took."""

    def __init__(self, model: Any, decoding: Decoding, out: TextIO, *, as_json: bool) -> None:
        self.model, self.decoding, self.out, self.as_json = model, decoding, out, as_json
        self.stats: GenerationStats | None = None
        self.echo = ""

    def write(self, prompts: list[str]) -> None:
        """All answers to all prompts; a single answer appears while it is written."""
        single = len(prompts) == 1 and getattr(self.decoding.choice, "copies", 1) == 1
        if single and not self.as_json and not isinstance(self.decoding.choice, BeamSettings):
            # with the first piece, so that a prompt that is refused is not echoed
            self.echo = prompts[0]
            answer = generate(self.model, prompts, decoding=self.decoding, on_piece=self._piece)
            self._say(f"{self.echo}\n")
        else:
            answer = generate(self.model, prompts, decoding=self.decoding)
            self._whole(prompts, answer)
        self.stats = answer.stats

    def _piece(self, piece: StreamPiece) -> None:
        echo, self.echo = self.echo, ""
        self._say(echo + piece.text)

    def _say(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()

    def _whole(self, prompts: list[str], answer: GenerationResult) -> None:
        several = sum(map(len, answer.rows)) > 1
        seeds = iter(answer.seeds)
        number = 0
        for prompt, hypotheses in zip(prompts, answer.rows):
            for hypothesis in hypotheses:
                number += 1
                seed = next(seeds, None)
                if self.as_json:
                    record = {"prompt": prompt, **hypothesis._asdict(), "seed": seed}
                    self._say(json.dumps(record, ensure_ascii=False) + "\n")
                    continue
                if several:
                    marks = [f"text {number}", *([] if seed is None else [f"seed {seed}"])]
                    marks += [] if hypothesis.score is None else [f"score {hypothesis.score:.3f}"]
                    self._say(f"--- {', '.join(marks)}\n")
                self._say(f"{prompt}{hypothesis.text}\n")
