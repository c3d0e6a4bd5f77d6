"""All options of `generate` as one frozen record, `Decoding`, and its construction from flat keywords."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack, final, get_args

from annotated_types import Le

from manyformer.decoding_options import DecodingOptions, StepPath
from manyformer.errors import UserError, suggest_names
from manyformer.generate.logits_processors import (
    LogitsProcessor,
    MinPProcessor,
    NoRepeatNGramProcessor,
    RepetitionPenaltyProcessor,
    TemperatureProcessor,
    TopKProcessor,
    TopPProcessor,
)
from manyformer.generate.token_choice import BeamSettings, GNMTPenalty, GreedyChoice, SampledChoice, TokenChoice


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
    ("graph"); "auto" selects graphs on a GPU for models that have static steps. Raises UserError.
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

    def __post_init__(self) -> None:
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
    """A `Decoding` from flat keywords, which are the same as on the command line.

    Any of temperature, top_k, top_p, min_p, seed and samples selects sampling; temperature 0 or no option selects
    greedy decoding; `beam` selects beam search that returns the `best` hypotheses, with the length penalty of Wu et al.
    2016 and the exponent `length_penalty` (0.6). Raises UserError for a value out of range and for options that
    contradict each other.
    """
    for name in options:
        if name not in DecodingOptions.__annotations__:
            raise TypeError(f"decoding has no option '{name}'; {suggest_names(name, DecodingOptions.__annotations__)}")
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, value in values.items():
        for bound in DecodingOptions.__annotations__[name].__metadata__:
            if isinstance(bound, Le) and value > bound.le:
                raise UserError(f"{name} must be at most {bound.le:,}, got {value:,}")
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
    )


def _token_choice(values: dict[str, Any]) -> TokenChoice:
    """The choice of tokens that the given options select."""
    sampling_options = [name for name, neutral in SAMPLING_OPTIONS.items() if values.get(name, neutral) != neutral]
    if "beam" in values:
        if sampling_options:
            raise UserError(f"beam search does not sample: leave out {sampling_options[0]}, or leave out beam")
        return BeamSettings(values["beam"], GNMTPenalty(values.get("length_penalty", 0.6)), values.get("best", 1))
    if "length_penalty" in values or values.get("best", 1) != 1:
        option = "best"
        if "length_penalty" in values:
            option = "length_penalty"
        raise UserError(f"{option} is for beam search: give beam as well")
    if values.get("temperature") == 0:
        if sampling_options not in ([], ["seed"]):
            message = f"leave out {sampling_options[0]} or raise temperature"
            raise UserError(f"temperature 0 always takes the likeliest token: {message}")
        return GreedyChoice()
    if sampling_options:
        return SampledChoice(values.get("seed"), values.get("samples", 1))
    return GreedyChoice()
