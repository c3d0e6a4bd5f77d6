"""The end of a training run: a sample of what the model can do now, the curves, and what to do next."""

import re
from itertools import islice
from typing import TextIO

from manyformer.config import ImagesData, RunConfig, SyntheticData
from manyformer.data import HeldOutExample, open_data
from manyformer.data.cache_folder import load_prepared
from manyformer.data.opened import read_examples
from manyformer.generate import decoding_from_options, stream, translate
from manyformer.models import EncoderDecoder, LanguageModel
from manyformer.train import TrainingEvent, TrainingFinished, TrainResult
from manyformer.train.reporter import LiveReporter, reporter

SAMPLE = 160
"""Tokens of the sample of a language model."""

TEMPERATURE = 0.7

LEAD = 40
"""Characters of held-out text from which the sample goes on."""

SHOWN = 3
"""Translations that are shown."""


class AfterTraining:
    """Listens to a run and keeps back the commands that go on from it, to be the last lines."""

    def __init__(self, out: TextIO, *, quiet: bool) -> None:
        self.out, self.quiet = out, quiet
        self.next: tuple[str, ...] = ()
        self.tell = reporter(out)

    def __call__(self, event: TrainingEvent) -> None:
        if isinstance(event, TrainingFinished):
            self.next = event.next_commands
            event = event._replace(next_commands=())
        if not self.quiet or isinstance(event, TrainingFinished):
            self.tell(event)

    def close(self) -> None:
        """Give the terminal back: what is said next stands below the bar."""
        if isinstance(self.tell, LiveReporter):
            self.tell.close()

    def show(self, run: RunConfig, result: TrainResult) -> None:
        """Print a sample, draw the curves, and say what to do next."""
        if not self.quiet:
            self._sample(run, result)
        self._curves(result)
        for number, line in enumerate(self.next if not self.quiet else ()):
            self._say(f"{'' if number else 'next':<8} {line}")

    def _sample(self, run: RunConfig, result: TrainResult) -> None:
        model = result.load()
        # levels of brightness are nothing to read
        if isinstance(model, LanguageModel) and not isinstance(run.data, ImagesData):
            self._write(model, _lead(run, result), run.seed)
        elif isinstance(model, EncoderDecoder):
            self._translate(model, list(islice(read_examples(result.out / "data", "valid"), SHOWN)))

    def _write(self, model: LanguageModel, lead: str, seed: int) -> None:
        room = SAMPLE if model.max_length is None else min(SAMPLE, model.max_length - len(model.tokenizer.encode(lead)))
        if room < 1:
            return
        self._say(f"sample   at temperature {TEMPERATURE}, after {lead!r}:")
        self._say("")
        decoding = decoding_from_options(temperature=TEMPERATURE, max_new=room, seed=seed)
        print(lead, end="", file=self.out, flush=True)
        for piece in stream(model, lead, decoding):
            print(piece.text, end="", file=self.out, flush=True)
        self._say("\n")

    def _translate(self, model: EncoderDecoder, examples: list[HeldOutExample]) -> None:
        texts = translate(model, [one.source for one in examples], tokenizer=model.tokenizer)
        for example, text in zip(examples, texts):
            self._say(f"sample   {example.source}")
            self._say(f"      →  {text}")
            self._say(f"   ref.  {example.target}")

    def _curves(self, result: TrainResult) -> None:
        from manyformer.view import plot_runs

        picture = result.out / "curves.png"
        plot_runs([result.out], picture)
        if not self.quiet:
            self._say(f"curves   {picture}")

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def _lead(run: RunConfig, result: TrainResult) -> str:
    """What a sample begins with: a function of Python's library, or the first whole words of the validation text."""
    if getattr(run.data, "path", None) == "stdlib":
        return "def "
    if isinstance(run.data, SyntheticData):
        made = open_data(run.data, "language-model", batch_tokens=run.batch.tokens, cache=result.out / "data", seed=0)
        return made.source.decode(next(iter(made.valid))[0][0, : LEAD // 4])
    ready = load_prepared(result.out / "data")
    assert ready is not None
    text = ready.tokenizers.source.decode(ready.shards["valid"].tokens[:LEAD])[:LEAD]
    words = re.sub(r"^\S*\s+|\s+\S*$", "", text)
    return words or text
