"""Everything that a call of `generate` may choose, as one frozen record; and the same as flat words."""

from dataclasses import dataclass, field
from typing import final

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
    """As many new tokens as the source has, and `extra` more (Vaswani et al. 2017, section 6.1)."""

    extra: int = 50

    def __post_init__(self) -> None:
        if self.extra < 0:
            raise UserError(f"extra must be 0 or more tokens beyond the source, got {self.extra}")


@final
@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How to go on from a prompt: how a token is picked, what shapes its probability before, and when to end.

    `max_new` None allows 256 tokens after a prompt, or as many as the source has and 50 more in a translation, and
    never more than the model has room for. `stop` holds strings, which need a tokenizer; `stop_ids` None means the
    tokenizer's end token (2 for an encoder-decoder without a tokenizer), `ban` None its padding and beginning.
    `use_cache` None uses the model's state where the model promises that it changes nothing. Raises UserError.
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
            raise UserError("a stop string must not be empty: it would stop before the first letter")
        if isinstance(self.choice, BeamSettings) and self.stop:
            raise UserError("beam search cannot end at stop strings: use stop_ids, or sample")
        useless = [type(s).__name__ for s in self.processors if s.sampling]
        if useless and not isinstance(self.choice, SampledChoice):
            what = "beam search" if isinstance(self.choice, BeamSettings) else "greedy decoding"
            raise UserError(f"{what} takes the likeliest tokens, so {useless[0]} would change nothing: leave it out")


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
    alpha: float | None = None,
    best: int = 1,
    stop: str | tuple[str, ...] = (),
    stop_ids: tuple[int, ...] | None = None,
    use_cache: bool | None = None,
) -> Decoding:
    """A `Decoding` from flat words, the same as on the command line.

    Any of temperature, top_k, top_p, min_p, seed and samples asks for sampling; temperature 0 and nothing at all mean
    the likeliest token; `beam` asks for beam search with Vaswani's length penalty `alpha` (0.6) and the `best` answers.
    Raises UserError for a value out of range and for words that contradict each other.
    """
    sampling = {"temperature": temperature or None, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    asked = [name for name, value in sampling.items() if value is not None] + (["samples"] if samples != 1 else [])
    pick = _search(beam, alpha, best, asked)
    if pick is None:
        if temperature == 0 and asked not in ([], ["seed"]):
            raise UserError(
                f"temperature 0 always takes the likeliest token: leave out {asked[0]} or raise temperature"
            )
        pick = SampledChoice(seed, samples) if asked and temperature != 0 else GreedyChoice()
    shape = (
        None if repetition_penalty is None else RepetitionPenaltyProcessor(repetition_penalty),
        None if no_repeat_ngram is None else NoRepeatNGramProcessor(no_repeat_ngram),
        # a temperature or a share of 1 changes nothing and should cost nothing
        None if temperature in (None, 0, 1) else TemperatureProcessor(temperature),
        None if top_k is None else TopKProcessor(top_k),
        None if top_p in (None, 1) else TopPProcessor(top_p),
        None if min_p is None else MinPProcessor(min_p),
    )
    return Decoding(
        choice=pick,
        processors=tuple(change for change in shape if change is not None),
        max_new=max_new,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=stop_ids,
        use_cache=use_cache,
    )


def _search(beam: int | None, alpha: float | None, best: int, asked: list[str]) -> TokenChoice | None:
    """The beam search that was asked for, if any; `asked` names what was asked of sampling."""
    if beam is None:
        if alpha is not None or best != 1:
            raise UserError(f"{'best' if alpha is None else 'alpha'} is for beam search: give beam as well")
        return None
    if asked:
        raise UserError(f"beam search does not sample: leave out {asked[0]}, or leave out beam")
    return BeamSettings(beam, GNMTPenalty() if alpha is None else GNMTPenalty(alpha), best)
