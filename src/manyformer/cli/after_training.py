"""The output after a training run: a sample from the model, the curves, and suggested next commands."""

from itertools import islice
from typing import Any, TextIO

from manyformer.cli.console import print_text
from manyformer.config import RunConfig
from manyformer.data import HeldOutExample
from manyformer.data.kind import OpenRequest, kind_of
from manyformer.data.opened import read_examples
from manyformer.files.text_tables import printable
from manyformer.generate import decoding_from_options, stream, translate
from manyformer.recipes.registry import task_of
from manyformer.train import TrainingEvent, TrainingFinished, TrainResult
from manyformer.train.events import LiveReporter, reporter

SAMPLE_TOKENS = 160
"""Length in tokens of a language model's sample."""

TEMPERATURE = 0.7

SAMPLE_TRANSLATIONS = 3
"""Number of translations shown."""


class AfterTraining:
    """An event listener of a run that holds back the suggested next commands until the end."""

    def __init__(self, out: TextIO, *, quiet: bool) -> None:
        self.out = out
        self.quiet = quiet
        self.next_commands: tuple[str, ...] = ()
        self.report = reporter(out)

    def __call__(self, event: TrainingEvent) -> None:
        if isinstance(event, TrainingFinished):
            self.next_commands = event.next_commands
            event = event._replace(next_commands=())
        if not self.quiet or isinstance(event, TrainingFinished):
            self.report(event)

    def close(self) -> None:
        """Stop the progress bar, so that later output appears below it."""
        if isinstance(self.report, LiveReporter):
            self.report.close()

    def show(self, run: RunConfig, result: TrainResult) -> None:
        """Print a sample, plot the curves, and print the next commands."""
        from manyformer.view import plot_runs

        if not self.quiet:
            self._print_sample(run, result)
        picture = result.out / "curves.png"
        plot_runs([result.out], picture)
        if self.quiet:
            return
        self._print(f"curves   {picture}")
        for number, line in enumerate(self.next_commands):
            self._print(f"{'' if number else 'next':<8} {line}")

    def _print_sample(self, run: RunConfig, result: TrainResult) -> None:
        model: Any = result.load()
        task = task_of(model)
        prompt_of = kind_of(run.data).sample_prompt
        if task.generates == "continuation" and prompt_of is not None:
            prompt = prompt_of(run.data, OpenRequest(run.batch.tokens, result.out / "data"))
            self._sample_text(model, prompt, run.seed)
        elif task.generates == "answer":
            examples = islice(read_examples(result.out / "data", "valid"), SAMPLE_TRANSLATIONS)
            self._sample_translations(model, list(examples))

    def _sample_text(self, model: Any, prompt: str, seed: int) -> None:
        max_new = SAMPLE_TOKENS
        if model.max_length is not None:
            max_new = min(max_new, model.max_length - len(model.tokenizer.encode(prompt)))
        if max_new < 1:
            return
        self._print(f"sample   at temperature {TEMPERATURE}, after {prompt!r}:\n")
        decoding = decoding_from_options(temperature=TEMPERATURE, max_new=max_new, seed=seed)
        print_text(prompt, end="", file=self.out)
        for piece in stream(model, prompt, decoding):
            print_text(piece.text, end="", file=self.out)
        self._print("\n")

    def _sample_translations(self, model: Any, examples: list[HeldOutExample]) -> None:
        texts = translate(model, [held_out.source for held_out in examples], tokenizer=model.tokenizer)
        for example, text in zip(examples, texts):
            self._print(f"sample   {example.source}\n      →  {text}\n   ref.  {example.target}")

    def _print(self, text: str) -> None:
        print(printable(text), file=self.out, flush=True)
