"""The results of generation: hypotheses, streamed pieces and statistics."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from manyformer.base.errors import UserError

FinishReason = Literal["end", "stop", "limit"]
"""Why a row ended: an end token, a stop string, or the limit on new tokens."""


class StreamPiece(NamedTuple):
    """What one decoding step adds to one row; `text` excludes characters that may be the beginning of a stop string."""

    row: int
    token: int | None
    text: str
    sample: int = 0
    finish: FinishReason | None = None


class Hypothesis(NamedTuple):
    """One generated sequence: its tokens without the prompt and the end token; `text` ends before a stop string.

    `score` is the log-probability divided by the length penalty, from beam search only.
    """

    tokens: list[int]
    text: str | None = None
    score: float | None = None
    finish: FinishReason = "limit"


class DraftCounts(NamedTuple):
    """Calls of a model after the prompt that verified drafts, the tokens that were drafted, and those that stood."""

    calls: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_call(self) -> float:
        """The tokens that a call gave: those that stood, and one more."""
        return 1 + self.accepted / max(self.calls, 1)

    def plus(self, added: "DraftCounts") -> "DraftCounts":
        """The sums of both."""
        return DraftCounts(self.calls + added.calls, self.drafted + added.drafted, self.accepted + added.accepted)

    def __str__(self) -> str:
        return f"{self.tokens_per_call:.2f} tokens a step, {self.accepted} of {self.drafted} drafted ones accepted"


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True)
class GenerationStats:
    """Token counts, time and memory of a generation; end tokens count as new, `seconds` include the prefill."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    cache_bytes: int
    cache: str
    drafts: DraftCounts = NO_DRAFTS

    @property
    def tokens_per_second(self) -> float:
        if self.seconds:
            return self.new_tokens / self.seconds
        return 0.0

    def __str__(self) -> str:
        rate = f"{self.new_tokens} tokens in {self.seconds:.2f} s ({self.tokens_per_second:.0f} tokens/s)"
        size = ""
        if self.cache_bytes:
            size = f", {self.cache_bytes / 1e6:.1f} MB"
        drafts = ""
        if self.drafts.calls:
            drafts = f"; {self.drafts}"
        return f"{rate} after {self.prompt_tokens} of prompt; {self.cache}{size}{drafts}"

    def __add__(self, added: "GenerationStats") -> "GenerationStats":
        """The totals of both runs; `cache_bytes` is the larger of the two, `cache` that of the later one."""
        return GenerationStats(
            self.prompts + added.prompts,
            self.prompt_tokens + added.prompt_tokens,
            self.new_tokens + added.new_tokens,
            self.seconds + added.seconds,
            max(self.cache_bytes, added.cache_bytes),
            added.cache,
            self.drafts.plus(added.drafts),
        )


@dataclass(frozen=True)
class GenerationResult:
    """The hypotheses of each prompt, best first (beam search) or in the order of their seeds, and the statistics."""

    rows: tuple[tuple[Hypothesis, ...], ...]
    stats: GenerationStats
    seeds: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of the first hypothesis of each prompt."""
        return [answers[0].tokens for answers in self.rows]

    @property
    def texts(self) -> list[str]:
        """The text of the first hypothesis of each prompt. Raises UserError where there was no tokenizer."""
        if any(answers[0].text is None for answers in self.rows):
            raise UserError("there is no text without a tokenizer: give tokenizer=, or read .tokens")
        return [answers[0].text or "" for answers in self.rows]

    @property
    def text(self) -> str:
        """The text of the first hypothesis of the first prompt."""
        return self.texts[0]
