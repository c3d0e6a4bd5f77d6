"""How a text is decoded: the choice of each token, greedy, sampled or by beam search, and the record of all options.

`Decoding` is that record, and `decoding_from_options` makes one of flat keywords."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack, final, get_args

import torch
from annotated_types import Le
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.base.errors import UserError, suggest_names
from manyformer.inference.decoding_options import DecodingOptions, DrafterName, StepPath
from manyformer.inference.generate.logits_processors import (
    LogitsProcessor,
    MinPProcessor,
    NoRepeatNGramProcessor,
    RepetitionPenaltyProcessor,
    TemperatureProcessor,
    TopKProcessor,
    TopPProcessor,
)
from manyformer.nn.runtime.devices import float64_device

MAX_UNIFORM = 1 - 2.0**-24
"""The largest random number that is drawn: its product with a sum stays below that sum in spite of rounding."""


class LengthPenalty(ABC):
    """The divisor of the log-probability of a sequence of `length` tokens, which must not decrease with the length.

    The length includes the end token and excludes the start token.
    """

    @abstractmethod
    def __call__(self, length: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]: ...


@final
@dataclass(frozen=True)
class GNMTPenalty(LengthPenalty):
    """((5 + length) / 6) ** alpha (Wu et al. 2016, equation 14; Vaswani et al. 2017 use alpha 0.6)."""

    alpha: float = 0.6

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def __call__(self, length: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return ((5 + length) / 6) ** self.alpha


@final
@dataclass(frozen=True)
class AverageLogProbPenalty(LengthPenalty):
    """length ** alpha, the rule of `transformers` and fairseq; alpha 1 gives the mean log-probability of a token."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def __call__(self, length: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return length**self.alpha


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha < float("inf"):
        raise UserError(f"the length penalty's alpha must be 0 (no penalty) or more, got {alpha}")


class BeamScores(NamedTuple):
    """The scores after a step of beam search, which decide whether the search for a prompt ends.

    `live` are the best log-probabilities of unfinished sequences, `finished` the scores of finished ones (best first,
    minus infinity where there is none), `best` the number of hypotheses to return, `penalty` and `final_penalty` the
    length penalties at the current and at the maximum length.
    """

    live: Float[Tensor, " b"]
    finished: Float[Tensor, "b w"]
    best: int
    penalty: Float[Tensor, ""]
    final_penalty: Float[Tensor, " b"]


class BeamStopping(ABC):
    """The rule that ends the search for one prompt before all its sequences are finished."""

    @abstractmethod
    def can_improve(self, scores: BeamScores) -> Bool[Tensor, " b"]:
        """Whether the search for each prompt continues."""


@final
@dataclass(frozen=True)
class ExactStopping(BeamStopping):
    """Ends when no unfinished sequence can enter the `best` hypotheses any more: the result of an exhaustive search."""

    def can_improve(self, scores: BeamScores) -> Bool[Tensor, " b"]:
        # a log-probability can only decrease, and the penalty is largest at the maximum length
        return scores.live / scores.final_penalty > scores.finished[:, scores.best - 1]


@final
@dataclass(frozen=True)
class LikelyStopping(BeamStopping):
    """Ends when the best unfinished sequence, scored at its current length, is worse than every finished one.

    The default of `transformers`: faster than `ExactStopping`, and it may miss a longer and better sequence if alpha is
    above 0."""

    def can_improve(self, scores: BeamScores) -> Bool[Tensor, " b"]:
        return scores.live / scores.penalty > scores.finished[:, -1]


@final
@dataclass(frozen=True)
class FullBeamStopping(BeamStopping):
    """Ends once `width` sequences are finished, and no later than `LikelyStopping`."""

    def can_improve(self, scores: BeamScores) -> Bool[Tensor, " b"]:
        # the last place of the beam is minus infinity until `width` sequences are finished
        return scores.finished[:, -1].isneginf() & LikelyStopping().can_improve(scores)


class StepChoice(ABC):
    """A method that chooses each token once, without revising it: greedy decoding or sampling."""

    @abstractmethod
    def seeds(self, prompts: int) -> list[int]:
        """One seed per row: the rows of the first prompt, then those of the second, and so on, equally many each."""

    @abstractmethod
    def draws(self, seeds: list[int], max_steps: int, device: torch.device) -> Float[Tensor, "r n"] | None:
        """A random number in [0, 1) for each row and step; None chooses the most likely tokens."""


@final
@dataclass(frozen=True)
class GreedyChoice(StepChoice):
    """Greedy decoding: the most likely token at each step."""

    def seeds(self, prompts: int) -> list[int]:
        return [0] * prompts

    def draws(self, seeds: list[int], max_steps: int, device: torch.device) -> None:
        return


@final
@dataclass(frozen=True)
class SampledChoice(StepChoice):
    """Sampling from the distribution of the next token; `samples` sequences for each prompt.

    Sample j of every prompt has its own generator, seeded with `seed` + j: a sequence depends on its prompt and its
    seed, never on the other rows of the batch. Without a seed a random one is drawn for every row. The seeds of each
    prompt start `seed_stride` above those of the previous prompt; with 0 all prompts have the same seeds.
    """

    seed: int | None = None
    samples: int = 1
    seed_stride: int = 0

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.samples < 1:
            raise UserError(f"samples must be 1 or more, got {self.samples}")

    def seeds(self, prompts: int) -> list[int]:
        if self.seed is not None:
            first_seeds = [self.seed + prompt * self.seed_stride for prompt in range(prompts)]
            return [first_seed + sample for first_seed in first_seeds for sample in range(self.samples)]
        # 48 bits: such numbers are exact in any JSON reader, and a text can be repeated from its seed
        return [int.from_bytes(os.urandom(6), "big") for _ in range(prompts * self.samples)]

    def draws(self, seeds: list[int], max_steps: int, device: torch.device) -> Float[Tensor, "r n"]:
        # drawn on the host, one generator a row, so that a seed means the same on every device and beside any other
        # rows
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = [torch.rand(max_steps, generator=generator, dtype=torch.float64) for generator in generators]
        return torch.stack(rows).clamp_(max=MAX_UNIFORM).to(float64_device(device))


@final
@dataclass(frozen=True)
class BeamSettings:
    """Beam search with `width` unfinished sequences per prompt, which returns the `best` finished ones with scores.

    Unfinished sequences are ranked by log-probability, finished ones by log-probability / `penalty`; `stopping` decides
    when the search ends. A sequence that reaches the length limit counts as finished.
    """

    width: int = 4
    penalty: LengthPenalty = field(default_factory=GNMTPenalty)
    best: int = 1
    stopping: BeamStopping = field(default_factory=ExactStopping)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"beam must be 1 or wider, got {self.width}")
        if not 1 <= self.best <= self.width:
            raise UserError(f"best must be from 1 to the beam's width {self.width}, got {self.best}")


TokenChoice = StepChoice | BeamSettings
"""How tokens are chosen: token by token, or by beam search."""


@final
@dataclass(frozen=True)
class SourceLengthLimit:
    """A limit on new tokens: the source length plus `extra` (Vaswani et al. 2017, section 6.1)."""

    extra: int = 50

    def __post_init__(self) -> None:
        if self.extra < 0:
            raise UserError(f"extra must be 0 or more tokens beyond the source, got {self.extra}")


@final
@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a prompt is continued: the choice of tokens, the logits processors and the conditions for ending.

    `max_new` None allows 256 tokens after a prompt, or the source length plus 50 in a translation, and never more than
    the model's `max_length`. `stop` holds strings, which need a tokenizer; `stop_ids` None means the tokenizer's end
    token (2 for an encoder-decoder without a tokenizer), `ban` None its padding and start tokens. `crop` leaves out the
    beginning of prompts that are too long for the model. `use_cache` None uses the decoding state if the recipe
    promises that it does not change the results. `step_path` is how tokens are decoded with it: "eager", by static
    steps ("static": the same operators on the same buffers for every token), or by these captured as CUDA graphs
    ("graph"); "auto" selects graphs on a GPU for models that have static steps. `draft` tokens are proposed by the
    `drafter` at a time, and verified by one call of the model; prompts are then decoded one by one. Raises UserError.
    """

    choice: TokenChoice = field(default_factory=GreedyChoice)
    processors: tuple[LogitsProcessor, ...] = ()
    max_new: int | SourceLengthLimit | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    ban: tuple[int, ...] | None = None
    crop: bool = False
    use_cache: bool | None = None
    step_path: StepPath = "auto"
    draft: int | None = None
    drafter: DrafterName | None = None

    def __post_init__(self) -> None:
        self._check_draft()
        if isinstance(self.max_new, int) and self.max_new < 1:
            raise UserError(f"max_new must be 1 or more tokens, got {self.max_new}")
        if "" in self.stop:
            raise UserError("a stop string must not be empty: every text would end before its first character")
        if isinstance(self.choice, BeamSettings) and self.stop:
            raise UserError("beam search cannot end at stop strings: use stop_ids, or sample")
        if self.step_path not in get_args(StepPath):
            raise UserError(f"step_path must be one of {', '.join(get_args(StepPath))}, got {self.step_path!r}")
        if self.use_cache is False and self.step_path in ("static", "graph"):
            raise UserError(f"step_path is {self.step_path}, but without a cache there are no steps: leave out one")
        ignored_processors = [type(processor).__name__ for processor in self.processors if processor.sampling]
        if ignored_processors and not isinstance(self.choice, SampledChoice):
            method = "greedy decoding"
            if isinstance(self.choice, BeamSettings):
                method = "beam search"
            processor = ignored_processors[0]
            raise UserError(f"{method} takes the likeliest tokens, so {processor} would change nothing: leave it out")

    def _check_draft(self) -> None:
        """Raise UserError for settings that exclude drafts."""
        if self.draft is None:
            if self.drafter is not None:
                raise UserError(f"drafter is {self.drafter}, but nothing is drafted: give the number of tokens, draft")
            return
        if self.draft < 1:
            raise UserError(f"draft must be 1 or more tokens, got {self.draft}")
        if self.drafter is not None and self.drafter not in get_args(DrafterName):
            raise UserError(f"drafter must be one of {', '.join(get_args(DrafterName))}, got {self.drafter!r}")
        if isinstance(self.choice, BeamSettings):
            raise UserError("beam search chooses among many texts, and drafts are for one: leave out draft or beam")
        if isinstance(self.choice, SampledChoice) and self.choice.samples > 1:
            raise UserError(f"draft decodes one text of each prompt: leave it out, or samples ({self.choice.samples})")
        if self.use_cache is False or self.step_path in ("static", "graph"):
            setting = "use_cache is False" if self.use_cache is False else f"step_path is {self.step_path}"
            raise UserError(f"{setting}, but drafts are verified with a cache, several tokens at a time: leave out one")


PROCESSORS: dict[str, Callable[[Any], LogitsProcessor]] = {
    "repetition_penalty": RepetitionPenaltyProcessor,
    "no_repeat_ngram": NoRepeatNGramProcessor,
    "temperature": TemperatureProcessor,
    "top_k": TopKProcessor,
    "top_p": TopPProcessor,
    "min_p": MinPProcessor,
}
"""The logits processors of the options, in the order in which they are applied."""

WITHOUT_EFFECT = {"temperature": (0, 1), "top_p": (1,)}
"""Values that change no logits and should cost nothing; temperature 0 selects greedy decoding instead."""

SAMPLING_OPTIONS = {"temperature": 0, "top_k": None, "top_p": None, "min_p": None, "seed": None, "samples": 1}
"""The options that select sampling, each with its value that does not."""


def decoding_from_options(**options: Unpack[DecodingOptions]) -> Decoding:
    """A `Decoding` from flat keywords, which mean the same on the command line, and have the same defaults there.

    No option that chooses tokens, `greedy` and temperature 0 select greedy decoding; any of temperature, top_k, top_p,
    min_p, seed and samples, and `greedy=False`, select sampling, at temperature 1 unless given; `beam` selects beam
    search that returns the `best` hypotheses, with the length penalty of Wu et al. 2016 and the exponent
    `length_penalty` (0.6). Raises UserError for a value out of range and for options that
    contradict each other.
    """
    for name in options:
        if name not in DecodingOptions.__annotations__:
            raise TypeError(f"decoding has no option '{name}'; {suggest_names(name, DecodingOptions.__annotations__)}")
    # None is what the command line passes for an option that was not given
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, value in values.items():
        for bound in DecodingOptions.__annotations__[name].__metadata__:
            # lower bounds are checked by the records themselves, which say what a smaller value would mean
            if isinstance(bound, Le) and value > bound.le:
                raise UserError(f"{name} must be at most {bound.le:,}, got {value:,}")
    # in the order of the table: a temperature changes what top_p allows
    processors = [
        make_processor(values[name])
        for name, make_processor in PROCESSORS.items()
        if name in values and values[name] not in WITHOUT_EFFECT.get(name, ())
    ]
    stop = options.get("stop", ())
    return Decoding(
        choice=_token_choice(values),
        processors=tuple(processors),
        max_new=options.get("max_new"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=options.get("stop_ids"),
        crop=bool(options.get("crop")),
        use_cache=options.get("use_cache"),
        step_path=options.get("step_path") or "auto",
        draft=options.get("draft"),
        drafter=options.get("drafter"),
    )


def _token_choice(values: dict[str, Any]) -> TokenChoice:
    """The choice of tokens that the given options select."""
    sampling_options = [name for name, neutral in SAMPLING_OPTIONS.items() if values.get(name, neutral) != neutral]
    greedy = values.get("greedy")
    if "beam" in values:
        others = [*sampling_options, *["greedy"] * (greedy is not None)]
        if others:
            raise UserError(f"beam search does not sample: leave out {others[0]}, or leave out beam")
        return BeamSettings(values["beam"], GNMTPenalty(values.get("length_penalty", 0.6)), values.get("best", 1))
    if "length_penalty" in values or values.get("best", 1) != 1:
        option = "best"
        if "length_penalty" in values:
            option = "length_penalty"
        raise UserError(f"{option} is for beam search: give beam as well")
    if values.get("temperature") == 0:
        # a seed changes nothing at temperature 0, and scripts give it with every temperature
        if sampling_options not in ([], ["seed"]):
            message = f"leave out {sampling_options[0]} or raise temperature"
            raise UserError(f"temperature 0 always takes the likeliest token: {message}")
        if greedy is False:
            raise UserError("temperature 0 always takes the likeliest token: leave out greedy or raise temperature")
        return GreedyChoice()
    if greedy:
        if sampling_options not in ([], ["seed"]):
            raise UserError(f"greedy always takes the likeliest token: leave out {sampling_options[0]}, or greedy")
        return GreedyChoice()
    if sampling_options or greedy is False:
        return SampledChoice(values.get("seed"), values.get("samples", 1))
    return GreedyChoice()
