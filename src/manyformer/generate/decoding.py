"""All options of `generate` as one frozen record, `Decoding`, and its construction from flat keywords."""

from dataclasses import dataclass, field
from typing import TypedDict, final

from manyformer.errors import UserError
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
    token (2 for an encoder-decoder without a tokenizer), `ban` None its padding and start tokens. `use_cache` None uses
    the decoding state if the recipe promises that it does not change the results. Raises UserError.
    """

    choice: TokenChoice = field(default_factory=GreedyChoice)
    processors: tuple[LogitsProcessor, ...] = ()
    max_new: int | SourceLengthLimit | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    ban: tuple[int, ...] | None = None
    use_cache: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_new, int) and self.max_new < 1:
            raise UserError(f"max_new must be 1 or more tokens, got {self.max_new}")
        if "" in self.stop:
            raise UserError("a stop string must not be empty: every text would end before its first character")
        if isinstance(self.choice, BeamSettings) and self.stop:
            raise UserError("beam search cannot end at stop strings: use stop_ids, or sample")
        ignored_processors = [type(processor).__name__ for processor in self.processors if processor.sampling]
        if ignored_processors and not isinstance(self.choice, SampledChoice):
            method = "beam search" if isinstance(self.choice, BeamSettings) else "greedy decoding"
            processor = ignored_processors[0]
            raise UserError(f"{method} takes the likeliest tokens, so {processor} would change nothing: leave it out")


class DecodingOptions(TypedDict, total=False):
    """The keywords of `decoding_from_options`, for functions that pass them on."""

    max_new: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram: int | None
    seed: int | None
    samples: int
    beam: int | None
    length_penalty: float | None
    best: int
    stop: str | tuple[str, ...]
    stop_ids: tuple[int, ...] | None
    use_cache: bool | None


def decoding_from_options(
    *,
    max_new: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    no_repeat_ngram: int | None = None,
    seed: int | None = None,
    samples: int = 1,
    beam: int | None = None,
    length_penalty: float | None = None,
    best: int = 1,
    stop: str | tuple[str, ...] = (),
    stop_ids: tuple[int, ...] | None = None,
    use_cache: bool | None = None,
) -> Decoding:
    """A `Decoding` from flat keywords, which are the same as on the command line.

    Any of temperature, top_k, top_p, min_p, seed and samples selects sampling; temperature 0 or no option selects
    greedy decoding; `beam` selects beam search that returns the `best` hypotheses, with the length penalty of Wu et al.
    2016 and the exponent `length_penalty` (0.6). Raises UserError for a value out of range and for options that
    contradict each other.
    """
    sampling = {"temperature": temperature or None, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling_options = [name for name, value in sampling.items() if value is not None] + (
        ["samples"] if samples != 1 else []
    )
    choice = _beam_settings(beam, length_penalty, best, sampling_options)
    if choice is None:
        if temperature == 0 and sampling_options not in ([], ["seed"]):
            raise UserError(
                f"temperature 0 always takes the likeliest token: leave out {sampling_options[0]} or raise temperature"
            )
        choice = SampledChoice(seed, samples) if sampling_options and temperature != 0 else GreedyChoice()
    processors = (
        None if repetition_penalty is None else RepetitionPenaltyProcessor(repetition_penalty),
        None if no_repeat_ngram is None else NoRepeatNGramProcessor(no_repeat_ngram),
        # a temperature or a top_p of 1 changes nothing and should cost nothing
        None if temperature in (None, 0, 1) else TemperatureProcessor(temperature),
        None if top_k is None else TopKProcessor(top_k),
        None if top_p in (None, 1) else TopPProcessor(top_p),
        None if min_p is None else MinPProcessor(min_p),
    )
    return Decoding(
        choice=choice,
        processors=tuple(processor for processor in processors if processor is not None),
        max_new=max_new,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=stop_ids,
        use_cache=use_cache,
    )


def _beam_settings(
    beam: int | None, length_penalty: float | None, best: int, sampling_options: list[str]
) -> TokenChoice | None:
    """The beam search that the options select, or None; `sampling_options` names the sampling options that are set."""
    if beam is None:
        if length_penalty is not None or best != 1:
            raise UserError(
                f"{'best' if length_penalty is None else 'length_penalty'} is for beam search: give beam as well"
            )
        return None
    if sampling_options:
        raise UserError(f"beam search does not sample: leave out {sampling_options[0]}, or leave out beam")
    return BeamSettings(beam, GNMTPenalty() if length_penalty is None else GNMTPenalty(length_penalty), best)
