"""Configuration of comparisons: the runs of the cases, the settings they are scored under, and the claims."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from manyformer.config.data_sections import swept_settings
from manyformer.config.run import RunConfig
from manyformer.config.section import ConfigSection, PathText, PositiveInt, SettingConflict, TupleOrText

CostName = Literal["parameters", "minutes", "total", "tokens", "step", "memory"]


class ComparisonFile(ConfigSection):
    """The settings of a comparison file besides its base run and its cases."""

    title: PathText
    """What is compared, in one line: the title of the table and the figure."""
    seeds: PositiveInt = 1
    """How many times each case is trained; the seeds count up from the seed of the run."""
    score: Annotated[tuple[PathText, ...], TupleOrText, Field(min_length=1)] = ("loss",)
    """Scores of the trained models, the main one first: loss, accuracy, perplexity, bits_per_byte, or a score of
    `manyformer evaluate` by its name, such as bleu."""
    split: Literal["valid", "test"] = "valid"
    """The held-out data that the models are scored on."""
    sweep: Annotated[dict[str, list[JsonValue]], Field(max_length=1)] = Field(default_factory=dict)
    """One setting of the run and several values: the trained models are scored under each of them."""
    trials: dict[str, Annotated[list[JsonValue], Field(min_length=1)]] = Field(default_factory=dict)
    """Settings of the run, each with several values: every case is trained with each combination of them. A case may
    have `trials` of its own in their place, such as other learning rates for another optimizer."""
    select: Literal["best", "all"] = "best"
    """What becomes of the trials of a case: `best` trains all of them with the first seed, and the one with the best
    first score on the validation data with the other seeds; with `all` each is a case, trained with every seed."""
    reference: PathText | None = None
    """The case whose number of parameters, besides those for each token of the vocabulary, all others have within 3 per
    cent: `ff_dim` or `dim` of each is solved for. null leaves sizes as they are."""
    cost: Annotated[tuple[CostName, ...], TupleOrText] = ("parameters", "minutes")
    """Cost columns of the table: parameters, minutes (of training), total (minutes of training with those of the case
    that it starts from), tokens (trained on), step (time of a training step, measured in turns), memory (of a training
    step)."""
    claims: Annotated[tuple[PathText, ...], TupleOrText] = ()
    """Expected results, such as `alibi@256 <= alibi@64 + 0.03` for the first score, or for another score or cost
    `step of short <= long * 0.9`; the report says which of them hold."""

    @property
    def setting(self) -> str | None:
        """The name of the swept setting, None without a sweep."""
        return next(iter(self.sweep), None)

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.setting and not self.setting.startswith(("model.", "data.")):
            yield SettingConflict(("sweep",), cannot_sweep(self.setting, swept_settings()))
        if self.select == "all" and not self.trials:
            yield SettingConflict(("select",), "must be best without trials: there are no trials to show")
        if self.setting in self.trials:
            yield SettingConflict(("trials",), f"'{self.setting}' is swept after training already", ("sweep",))


def cannot_sweep(setting: str, swept: Sequence[str]) -> str:
    """The error message for a setting that cannot be swept, where the data settings `swept` can."""
    names = [f"data.{name}" for name in swept]
    can_change = f"model.KEYWORD and {', '.join(names)} can; `trials:` trains anew with each value"
    return f"'{setting}' cannot be changed after training; {can_change}"


@dataclass(frozen=True)
class CaseTrial:
    """One training of a case, and the runs it is scored under.

    `label` names the settings in which the trials of a case differ, such as `optim.lr 0.003`; it is empty for an only
    trial. `points` are the runs it is scored under, one for each value of the sweep (or only its own run), None if its
    recipe has no such setting."""

    label: str
    run: RunConfig
    points: tuple[RunConfig | None, ...]

    def with_runs(self, change: Callable[[RunConfig], RunConfig]) -> "CaseTrial":
        """The trial with all of its runs changed."""
        points = tuple(None if point is None else change(point) for point in self.points)
        return CaseTrial(self.label, change(self.run), points)


@dataclass(frozen=True)
class ComparisonCase:
    """One row of the table: the trials of a run, the best of which is scored.

    `trained_by` names the case whose trained weights it uses, None if it is trained itself. `init_from_case` names the
    case whose final weights, of the same seed, initialize its training."""

    name: str
    trials: tuple[CaseTrial, ...]
    trained_by: str | None
    init_from_case: str | None = None

    @property
    def run(self) -> RunConfig:
        """The run of the first trial."""
        return self.trials[0].run

    @property
    def points(self) -> tuple[RunConfig | None, ...]:
        """The runs under which the first trial is scored."""
        return self.trials[0].points


@dataclass(frozen=True)
class Comparison:
    """A validated comparison: its settings and its cases."""

    name: str
    about: str
    file: ComparisonFile
    cases: tuple[ComparisonCase, ...]

    @property
    def setting(self) -> str | None:
        """The name of the swept setting, None without a sweep."""
        return self.file.setting

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of the sweep; a single None without a sweep."""
        return tuple(next(iter(self.file.sweep.values()), [None]))

    def case(self, name: str) -> ComparisonCase:
        """The case with this name."""
        return next(case for case in self.cases if case.name == name)

    def stage(self, case: ComparisonCase) -> int:
        """The number of cases that must be trained one after the other before this one."""
        if case.init_from_case is None:
            return 0
        # it ends: cases that begin with each other's weights are refused when the file is read
        return 1 + self.stage(self.case(case.init_from_case))
