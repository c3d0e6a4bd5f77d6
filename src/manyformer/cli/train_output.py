"""What `manyformer train` prints besides the run: the summary of `--dry-run`, and what follows after training.

That is what the scores mean, the shipped curve of the same run, the model's card, and suggested next commands."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import make_folder
from manyformer.base.files.text_tables import printable, printable_line
from manyformer.cli.console import format_count, print_json, print_result, print_text
from manyformer.config import MuonConfig, RunConfig
from manyformer.data import HeldOutExample
from manyformer.data.pipeline.kind import OpenRequest, kind_of
from manyformer.data.pipeline.opened import read_examples
from manyformer.models import Model
from manyformer.nn.runtime.devices import OutOfMemory
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.model_summary import count_parameters, forward_cost, module_rows
from manyformer.recipes.parts.registry import task_of
from manyformer.training import TrainingEvent, TrainingFinished, TrainResult
from manyformer.training.build_model import choose_device
from manyformer.training.events import LiveReporter, reporter
from manyformer.training.muon import iteration_dtype
from manyformer.training.parameter_rules import ParameterRule, weight_decay_groups
from manyformer.training.process_group import SINGLE_PROCESS_GROUP
from manyformer.training.run_checks import (
    PlannedModel,
    check_layers,
    check_memory,
    expected_model,
    planned_model,
    planned_rules,
    planned_schedule,
    survey_run,
)
from manyformer.training.schedules import DRAWN_POINTS, Schedule, draw_rates
from manyformer.training.width_transfer import rate_scales

if TYPE_CHECKING:
    from manyformer.training.rate_search import RateTest

SAMPLE_TOKENS = 160
"""Length in tokens of a sample."""

TEMPERATURE = 0.7
SAMPLE_TRANSLATIONS = 3
"""Number of translations shown."""
EXAMPLE_WEIGHTS = 3
"""Number of weights that are named for each rule."""

WIDTH = 80
"""Lines of text are as wide as a terminal at least is."""

INDENT = "#          "
"""What a comment below another one begins with."""


def print_summary(run: RunConfig, *, every_weight: bool = False) -> None:
    """Print the model and the data as comments, so that the output of `--dry-run` is still a run file.

    With `every_weight` each weight is named with its optimizer."""
    expected = expected_model(run)
    try:
        check_memory(run, expected.model)
        check_layers(run, expected.model)
        survey = survey_run(run)
    except UserError as error:
        # the size of the model is known without the data; the cost of a step takes long for one that never fits
        _print_model(run, expected, with_cost=not isinstance(error, OutOfMemory))
        raise
    planned = planned_model(run, survey.data, expected)
    _print_model(run, planned)
    for subject, text in survey.data.lines:
        print_result(*(f"# {subject:<8} {line}" for line in text.splitlines()))
    if (batch := survey.describe_batch()) is not None:
        print_result(f"# {'batch':<8} the first one has {batch}")
    _print_optimizers(run, planned.model, every_weight=every_weight)
    check_memory(run, planned.model)
    _print_schedule(planned_schedule(run, planned.model))
    for subject, text in _training_lines(run, planned.model):
        print_result(f"# {subject:<8} {text}")
    print_result("# nothing was trained: this was --dry-run")


def print_summary_as_json(run: RunConfig) -> None:
    """Print the run, the size of its model and the facts of its data as one JSON document."""
    survey = survey_run(run).data
    planned = planned_model(run, survey, expected_model(run))
    check_memory(run, planned.model)
    schedule = planned_schedule(run, planned.model)
    print_json(
        {
            "run": run.model_dump(mode="json", by_alias=True),
            "model": {"parameters": count_parameters(planned.model), "assumption": planned.assumption},
            "optimizer": [_rule_record(rule) for rule in planned_rules(run, planned.model)],
            "schedule": {"course": schedule.describe(), "rates": schedule.sample(DRAWN_POINTS)},
            "data": {
                "lines": [text for _, text in survey.lines],
                "summary": None if survey.summary is None else survey.summary.as_json(),
            },
        }
    )


def _print_model(run: RunConfig, planned: PlannedModel, *, with_cost: bool = True) -> None:
    model = planned.model
    assumption = planned.assumption or "with this data"
    print_result()
    print_result(f"# {get_recipe(run.recipe).card.title}: {count_parameters(model):,} parameters ({assumption})")
    for part in module_rows(model):
        if part.level < 2 and part.parameters:
            times = f" x {part.times}" if part.times > 1 else ""
            print_result(f"#   {'  ' * part.level}{part.name}{times} {part.kind}: {part.parameters:,}")
    decayed, undecayed = (sum(weight.numel() for weight in group) for group in weight_decay_groups(model))
    print_result(
        f"# weight decay: {decayed:,} parameters decay, {undecayed:,} do not (biases, norms, tables, positions)"
    )
    if not with_cost:
        return
    # a row of the data is as long as the model allows at most, unlike the one that is assumed
    length = min(planned.row_length, model.max_length or planned.row_length)
    # a backward pass computes about twice as much as a forward pass
    step = 3 * forward_cost(model, length).flops * run.batch.tokens * run.batch.accumulate / length
    print_result(f"# a step: {run.batch.tokens * run.batch.accumulate:,} tokens, about {format_count(step)}FLOP")


def _print_optimizers(run: RunConfig, model: Model, *, every_weight: bool) -> None:
    """Print which rule gives which weights to which optimizer: counts and examples, or all of them."""
    by_rule: dict[tuple[str, str], list[ParameterRule]] = {}
    for rule in planned_rules(run, model):
        by_rule.setdefault((rule.kind, rule.reason), []).append(rule)
    # one optimizer for all weights is in the run itself
    if len(by_rule) < 2 and not every_weight:
        return
    for (kind, reason), rules in sorted(by_rule.items(), reverse=True):
        count = sum(rule.weight.numel() for rule in rules)
        print_result(f"# {kind:<8} {len(rules):,} weights, {count:,} parameters: {reason}")
        decays = _range([rule.weight_decay for rule in rules])
        print_result(f"{INDENT}{_rates(run, rules)}, weight decay {decays}")
        names = [rule.name for rule in rules[:EXAMPLE_WEIGHTS]]
        if len(rules) > EXAMPLE_WEIGHTS:
            names.append("...")
        lines = textwrap.wrap(", ".join(names), WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        if every_weight:
            lines = [f"{INDENT}{rule.name} {tuple(rule.weight.shape)}" for rule in rules]
        print_result(*lines)
    if isinstance(run.optim, MuonConfig):
        dtype: str = run.optim.ns_dtype
        if dtype == "auto":
            device = choose_device(run.device, SINGLE_PROCESS_GROUP)
            dtype = str(iteration_dtype(device)).removeprefix("torch.")
        print_result(f"# {'muon':<8} orthogonalizes in {dtype}")


def _range(numbers: list[float]) -> str:
    if min(numbers) == max(numbers):
        return f"{numbers[0]:g}"
    return f"{min(numbers):g} to {max(numbers):g}"


def _rates(run: RunConfig, rules: list[ParameterRule]) -> str:
    if run.optim.lr is None:
        # the schedule has the rate
        return f"learning rate of the schedule times {_range([rule.lr_scale for rule in rules])}"
    return f"learning rate {_range([run.optim.lr * rule.lr_scale for rule in rules])}"


def _rule_record(rule: ParameterRule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "shape": list(rule.weight.shape),
        "optimizer": rule.kind,
        "rule": rule.reason,
        "lr_scale": rule.lr_scale,
        "weight_decay": rule.weight_decay,
    }


def _print_schedule(schedule: Schedule) -> None:
    """Say what the learning rate does over the run, and draw it."""
    first, *further = textwrap.wrap(f"schedule {schedule.describe()}", WIDTH - 11, break_long_words=False)
    print_result(
        f"# {first}", *(f"#          {line}" for line in [*further, draw_rates(schedule.sample(DRAWN_POINTS))])
    )


def _training_lines(run: RunConfig, model: Model) -> Iterator[tuple[str, str]]:
    """Yield what a run does besides plain steps at one rate for all weights."""
    batch = run.batch
    if batch.start is not None:
        end = f"{batch.warmup_tokens:,} tokens" if batch.warmup_steps is None else f"{batch.warmup_steps:,} steps"
        yield "batch", f"from {batch.start} to {batch.accumulate} passes a step, in {end}"
    if run.ema.beta is not None:
        use = "scored, and saved as the final model" if run.ema.evaluate else "the final model if it scores better"
        yield "average", f"moving average of the weights, beta {run.ema.beta:g}: {use}"
    if run.mup.base_width is not None:
        counts: Counter[float] = Counter()
        scales = rate_scales(run, model)
        for name, weight in model.named_parameters():
            counts[scales[name]] += weight.numel()
        parts = [f"{count:,} parameters x {scale:.3g}" for scale, count in sorted(counts.items())]
        yield "rates", f"of width {run.mup.base_width}, here: {', '.join(parts)}"


def print_rate_test(run: RunConfig, *, as_json: bool) -> None:
    """Try growing learning rates; print the losses and the suggested rate, and draw them beside the run's folder."""
    from manyformer.analysis.figures.curves import draw_rate_test
    from manyformer.training.rate_search import find_learning_rate

    assert run.out is not None
    test = find_learning_rate(run)
    out = Path(run.out)
    picture = out.with_name(f"{out.name}-find-lr.png")
    make_folder(picture.parent)
    draw_rate_test(test, picture)
    if as_json:
        print_json({**test._asdict(), "picture": str(picture)})
        return
    steps = len(test.rates)
    print_result(f"tried    {steps} rates from {test.rates[0]:.2g} to {test.rates[-1]:.2g} in {test.seconds:.0f} s")
    # from the lowest loss to a little above the first, so that a diverged end does not flatten what decides
    lowest = min(test.smoothed)
    highest = 1.1 * test.smoothed[0]
    heights = [min(loss, highest) - lowest for loss in test.smoothed[:: max(1, steps // DRAWN_POINTS)]]
    print_result(f"loss     {draw_rates(heights)}")
    for name, text in (("suggests", _rate_setting(test)), ("because", test.reason), ("picture", str(picture))):
        first, *further = textwrap.wrap(text, WIDTH - 9, break_long_words=False)
        print_result(f"{name:<8} {first}", *(f"         {line}" for line in further))


def _rate_setting(test: "RateTest") -> str:
    """The setting with the suggested rate."""
    if test.suggested is None:
        return "no rate"
    return f"optim.lr={test.suggested:g}"


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
            # they come last, after the sample and the picture
            event = event._replace(next_commands=())
        if not self.quiet or isinstance(event, TrainingFinished):
            self.report(event)

    def close(self) -> None:
        """Stop the progress bar, so that later output appears below it."""
        if isinstance(self.report, LiveReporter):
            self.report.close()

    def show(self, run: RunConfig, result: TrainResult) -> None:
        """Say what the scores mean, draw the curves, and print the model's card and the next commands."""
        from manyformer.analysis.figures.curves import plot_runs, read_curves
        from manyformer.analysis.shipped_curves import curves_of_same_run, table_beside

        picture = result.out / "curves.png"
        curves = read_curves(result.out)
        shipped = curves_of_same_run(run)
        plot_runs([result.out], picture, references=[curve.curves for curve in shipped])
        if self.quiet:
            return
        model: Any = result.load()
        self._print_sample(model, run, result)
        self._print_text("means", self._meaning(run, result))
        if shipped:
            text = f"bits per byte beside the shipped run ({shipped[0].data})"
            last = shipped[0].rows[-1]["step"]
            if result.step < last:
                text += f"; this run has made {result.step:,} of its {last:,.0f} steps"
            self._print_text("beside", text)
            self._print_lines("", table_beside(shipped, curves))
        self._print(f"curves   {picture}")
        sizes = ", ".join(f"{name} {value}" for name, value in run.model.items())
        card = get_recipe(run.recipe).card
        tokens = format_count(curves.rows[-1]["tokens"])
        text = f"{card.title} ({run.recipe}{': ' * bool(sizes)}{sizes}), {count_parameters(model):,} parameters"
        self._print_text("card", f"{text}, trained on {tokens} tokens; paper: {card.paper}")
        self._print(f"         {result.out / 'model' / 'README.md'}")
        self._print_lines("next", self.next_commands)

    def _meaning(self, run: RunConfig, result: TrainResult) -> str:
        from manyformer.analysis.baselines import meaning_of_scores

        try:
            return meaning_of_scores(run, result)
        except UserError as error:
            # the model is trained, whatever has become of its data
            return f"the scores could not be set beside guesses without a model: {error}"

    def _print_sample(self, model: Any, run: RunConfig, result: TrainResult) -> None:
        """Print what a reader can judge: translations beside their references, continuations of generated rows."""
        prompt_of = kind_of(run.data).sample_prompt
        generates = task_of(model).generates
        if generates == "continuation" and prompt_of is not None:
            prompt = prompt_of(run.data, OpenRequest(run.batch.tokens, result.out / "data"))
            self._sample_text(model, prompt, run.seed)
        elif generates == "answer":
            examples = islice(read_examples(result.out / "data", "valid"), SAMPLE_TRANSLATIONS)
            self._sample_translations(model, list(examples))

    def _sample_text(self, model: Any, prompt: str, seed: int) -> None:
        # imported here because a dry run generates nothing
        from manyformer.inference.generate import decoding_from_options, stream

        max_new = SAMPLE_TOKENS
        if model.max_length is not None:
            max_new = min(max_new, model.max_length - len(model.tokenizer.encode(prompt)))
        # the prompt alone fills what the model can read
        if max_new < 1:
            return
        self._print(f"sample   at temperature {TEMPERATURE}, after {prompt!r}:\n")
        decoding = decoding_from_options(temperature=TEMPERATURE, max_new=max_new, seed=seed)
        print_text(prompt, end="", file=self.out)
        for piece in stream(model, prompt, decoding):
            print_text(piece.text, end="", file=self.out)
        self._print("\n")

    def _sample_translations(self, model: Any, examples: list[HeldOutExample]) -> None:
        from manyformer.inference.generate import translate

        texts = translate(model, [held_out.source for held_out in examples], tokenizer=model.tokenizer)
        for example, text in zip(examples, texts):
            self._print(f"sample   {example.source}\n      →  {text}\n   ref.  {example.target}")

    def _print_text(self, subject: str, text: str) -> None:
        self._print_lines(subject, textwrap.wrap(printable_line(text), WIDTH - 9, break_long_words=False))

    def _print_lines(self, subject: str, lines: Iterable[str]) -> None:
        """Print lines of which the first is headed by their subject."""
        for number, line in enumerate(lines):
            self._print(f"{'' if number else subject:<8} {line}")

    def _print(self, text: str) -> None:
        print(printable(text), file=self.out, flush=True)
