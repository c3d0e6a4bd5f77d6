"""`generate` and `stream` decode prompts batch by batch: all results at the end, or pieces as they come."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Unpack, cast, final

import torch

from manyformer.base.errors import UserError
from manyformer.inference.decoding_options import DecodingOptions
from manyformer.inference.generate.beam_search import BeamSearch
from manyformer.inference.generate.decoding import BeamSettings, Decoding, SampledChoice, decoding_from_options
from manyformer.inference.generate.drafters import make_drafter
from manyformer.inference.generate.logits_processors import BanTokensProcessor
from manyformer.inference.generate.next_token import LogitsFeed, UncachedFeed, cached_feed
from manyformer.inference.generate.prompts import (
    DecoderPrompts,
    PromptBatch,
    TokenPrompts,
    check_tokens,
    crop_prompts,
    read_prompts,
    read_vocab,
    special_tokens,
)
from manyformer.inference.generate.protocol import GenerativeModelProtocol, TokenizerProtocol, TranslatesText
from manyformer.inference.generate.result import (
    DraftCounts,
    GenerationResult,
    GenerationStats,
    Hypothesis,
    StreamPiece,
)
from manyformer.inference.generate.rewindable_feed import RewindableFeed
from manyformer.inference.generate.sampling import DecodeBatch, StepwiseDecoder, TextReading
from manyformer.inference.generate.speculative import SpeculativeDecoder
from manyformer.models.generative_model import LanguageModel, as_language_model
from manyformer.models.model import Model, eval_mode
from manyformer.models.model_files import ModelSpec
from manyformer.nn.runtime.devices import report_missing_operator, report_out_of_memory
from manyformer.nn.runtime.torch_internals import has_hooks
from manyformer.recipes.parts.registry import card_of

TokenizerChoice = TokenizerProtocol | tuple[TokenizerProtocol, TokenizerProtocol]
"""One tokenizer, or the pair of the source's and the target's tokenizers."""


def generate(
    model: GenerativeModelProtocol,
    prompts: PromptBatch,
    *,
    tokenizer: TokenizerChoice | None = None,
    decoding: Decoding | None = None,
    on_piece: Callable[[StreamPiece], None] | None = None,
    batch: int = 32,
    begin: bool | None = None,
    **options: Unpack[DecodingOptions],
) -> GenerationResult:
    """Continue `prompts` with a language model, or translate them with an encoder-decoder, `batch` rows at a time.

    `prompts` is one prompt or a list of them: strings (with a `tokenizer`, which a model loaded from a run has itself),
    lists of token ids or tensors. `begin` puts the start token in front of strings; None does where the tokenizer of an
    imported model does. The options are those of `decoding_from_options`; `decoding` gives them as one object instead.
    `on_piece` is called with each `StreamPiece` as soon as it is decoded. The result of a row does not depend on the
    other rows. Raises UserError."""
    from_options = decoding_from_options(**options)
    if decoding is not None and from_options != decoding_from_options():
        raise UserError("give either decoding= or single settings, not both")
    decoding = from_options if decoding is None else decoding
    streaming = on_piece is not None
    job = _decode_job(model, prompts, decoding, tokenizer, batch, begin=begin, streaming=streaming)
    # a job decodes while it is iterated, also where nobody wants the pieces
    for piece in job:
        if on_piece is not None:
            on_piece(piece)
    return GenerationResult(tuple(job.answers), job.stats, tuple(job.seeds))


def stream(
    model: GenerativeModelProtocol,
    prompts: PromptBatch,
    decoding: Decoding,
    *,
    tokenizer: TokenizerChoice | None = None,
    batch: int = 32,
    begin: bool | None = None,
) -> Iterator[StreamPiece]:
    """Yield the pieces of `generate`, each as soon as it is decoded. Raises UserError at the call, as `generate`."""
    return iter(_decode_job(model, prompts, decoding, tokenizer, batch, begin=begin, streaming=True))


@final
class DecodeJob:
    """One call of `generate`, `batch_size` prompts at a time: iterating yields the pieces and fills `answers`, `stats`.

    `limits` are the most new tokens of each prompt, by default those that `decoding` and the model allow.
    """

    def __init__(
        self,
        model: GenerativeModelProtocol,
        prompts: DecoderPrompts,
        decoding: Decoding,
        tokenizer: TokenizerProtocol | None,
        *,
        batch_size: int,
        limits: list[int] | None = None,
        streaming: bool = False,
    ) -> None:
        if decoding.stop and tokenizer is None:
            raise UserError("stop strings need a tokenizer: give tokenizer=, or stop_ids")
        if streaming and isinstance(decoding.choice, BeamSettings):
            raise UserError("beam search selects its hypotheses only at the end, so there is nothing to stream")
        self.model = model
        self.prompts = prompts
        self.decoding = decoding
        self.batch_size = batch_size
        self.drafting_model: LanguageModel | None = None
        if decoding.draft is not None:
            # rows accept different numbers of tokens
            self.batch_size = 1
            self.drafting_model = _drafting_model(model)
        self.drafts = DraftCounts()
        if limits is None:
            self.limits = prompts.new_token_limits(model, decoding)
        else:
            self.limits = limits
        self.cache_refusal = cache_refusal(model, use_cache=decoding.use_cache)
        self.special = special_tokens(model, tokenizer, decoding)
        self.reading = TextReading(tokenizer, decoding.stop, streaming)
        self.answers: list[tuple[Hypothesis, ...]] = []
        self.seeds: list[int] = []
        self.seconds = 0.0
        self.new_tokens = 0
        self.cache_bytes = 0
        self.steps = ""
        if self.cache_refusal is not None and decoding.draft is not None:
            raise UserError(f"draft is {decoding.draft}, but this model has no cache{self.cache_refusal}")
        if self.cache_refusal is not None and decoding.step_path in ("static", "graph"):
            raise UserError(f"step_path is {decoding.step_path}, but this model has no cache{self.cache_refusal}")

    def __iter__(self) -> Iterator[StreamPiece]:
        with eval_mode(self.model):
            for start in range(0, len(self.prompts), self.batch_size):
                try:
                    yield from self._decode_batch(start)
                except Exception:
                    # only where it fails is it asked what a batch takes, and what a failure of torch means
                    with report_out_of_memory(*self._memory_use(start)), report_missing_operator(self._model_name):
                        raise

    @property
    def stats(self) -> GenerationStats:
        steps = f", {self.steps}" if self.steps else ""
        if self.cache_refusal is None:
            cache = f"with cache{steps}"
        else:
            cache = f"without cache{self.cache_refusal}"
        prompts = len(self.prompts)
        prompt_tokens = self.prompts.token_count
        return GenerationStats(
            prompts, prompt_tokens, self.new_tokens, self.seconds, self.cache_bytes, cache, self.drafts
        )

    @property
    def _model_name(self) -> str:
        spec: ModelSpec | None = getattr(self.model, "spec", None)
        if spec is None:
            return type(self.model).__name__
        return spec.recipe

    def _memory_use(self, start: int) -> tuple[str, str]:
        """What the decoding of a batch is called if the memory does not suffice, and what makes it smaller."""
        rows = min(self.batch_size, len(self.prompts) - start)
        limit = max(self.limits)
        sequences = getattr(self.decoding.choice, "width", getattr(self.decoding.choice, "samples", 1))
        work = f"in the decoding of {rows} prompts with {sequences} sequences each, of up to {limit:,} new tokens"
        return work, "make the beam, the samples, the batch or max_new smaller"

    def _decode_batch(self, start: int) -> Iterator[StreamPiece]:
        started = time.perf_counter()
        # never around a yield: inference mode would stay active in the code that consumes the pieces
        with torch.inference_mode():
            decoder = self._make_decoder(self._make_batch(slice(start, start + self.batch_size)))
        self.seconds += time.perf_counter() - started
        try:
            yield from self._advance(decoder, start)
        finally:
            # also where the consumer stops early: a captured step would otherwise be lost for later calls
            decoder.batch.feed.close()
        self.answers += decoder.results()
        self.new_tokens += decoder.new_tokens
        self.cache_bytes = max(self.cache_bytes, decoder.cache_bytes)
        if isinstance(decoder, SpeculativeDecoder):
            self.drafts = self.drafts.plus(decoder.counts)
        # batches of a single token have taken no step
        self.steps = decoder.batch.feed.steps or self.steps

    def _advance(self, decoder: StepwiseDecoder | BeamSearch | SpeculativeDecoder, start: int) -> Iterator[StreamPiece]:
        """The pieces of a decoder whose first prompt is that with the index `start`."""
        while not decoder.is_done:
            started = time.perf_counter()
            with torch.inference_mode():
                pieces = decoder.advance()
            self.seconds += time.perf_counter() - started
            for piece in pieces:
                # the decoder counts the rows of its batch, the caller those of all prompts
                yield piece._replace(row=start + piece.row) if start else piece

    def _make_batch(self, batch_rows: slice) -> DecodeBatch:
        """Make the batch of these rows; an encoder-decoder encodes its sources here."""
        limits = self.limits[batch_rows]
        banned_ids = self.special.banned_ids
        processors = self.decoding.processors
        # first: what is banned must not count among the most likely tokens of the others
        if banned_ids:
            processors = (BanTokensProcessor(banned_ids), *processors)
        tokens, source = self.prompts.batch(self.model, batch_rows, self.special.bos or 0)
        capacity = tokens.shape[1] + max(limits)
        feed: LogitsFeed
        if self.drafting_model is not None and self.decoding.draft is not None:
            feed = RewindableFeed(self.drafting_model, capacity + self.decoding.draft)
        elif self.cache_refusal is None:
            # beam search copies the state at every step, and a reserved capacity would be copied with it
            reserve = not isinstance(self.decoding.choice, BeamSettings)
            feed = cached_feed(self.model, source, len(tokens), capacity, reserve=reserve, path=self.decoding.step_path)
        else:
            feed = UncachedFeed(self.model, source)
        return DecodeBatch(feed, tokens, limits, self.special.stop_ids, processors, self.special.forced)

    def _make_decoder(self, batch: DecodeBatch) -> StepwiseDecoder | BeamSearch | SpeculativeDecoder:
        choice = self.decoding.choice
        if isinstance(choice, BeamSettings):
            return BeamSearch(batch, choice, self.reading.tokenizer)
        decoder: StepwiseDecoder | SpeculativeDecoder
        if self.drafting_model is not None and self.decoding.draft is not None:
            count = self.decoding.draft
            drafter = make_drafter(self.drafting_model, count, self.decoding.drafter)
            decoder = SpeculativeDecoder(batch, choice, self.reading, drafter, count)
        else:
            decoder = StepwiseDecoder(batch, choice, self.reading)
        if isinstance(choice, SampledChoice):
            self.seeds += decoder.seeds
        return decoder


def _drafting_model(model: GenerativeModelProtocol) -> LanguageModel:
    """The model, if its hidden states can be read. Raises UserError for any other."""
    # any object of the protocol may be passed, and is refused by its class
    language_model = as_language_model(cast(Model, model), "decode with draft")
    if has_hooks(language_model):
        raise UserError("draft reads hidden states, where hooks of the whole model are not called: remove them")
    return language_model


def cache_refusal(model: GenerativeModelProtocol, *, use_cache: bool | None) -> str | None:
    """Why decoding does not use the model's state, which needs a recipe that promises `incremental_decoding`.

    None if it does, "" if `use_cache` is False. Raises UserError if `use_cache` is True without that promise.
    """
    spec = getattr(model, "spec", None)
    card = None if spec is None else card_of(spec)
    if use_cache is False:
        return ""
    if card is None or "incremental_decoding" in card.promises:
        return None
    reason = card.reasons["incremental_decoding"]
    if use_cache:
        raise UserError(f"{card.name} cannot use a cache ({reason}): leave use_cache out or make it False")
    return f" ({reason})"


def _decode_job(
    model: GenerativeModelProtocol,
    prompts: PromptBatch,
    decoding: Decoding,
    tokenizer: TokenizerChoice | None,
    batch: int,
    *,
    begin: bool | None,
    streaming: bool,
) -> DecodeJob:
    # by its members, not its class: any object of the protocol may be passed
    if not (hasattr(model, "init_state") and hasattr(model, "vocab")):
        kind = type(model).__name__
        remedy = "; mf.denoise fills its hidden tokens" if hasattr(model, "mask_token") else ""
        raise UserError(
            f"a {kind} does not generate text: generate needs a language model or an encoder-decoder{remedy}"
        )
    if batch < 1:
        raise UserError(f"batch must be 1 or more rows, got {batch}")
    tokenizers = read_write_tokenizers(getattr(model, "tokenizer", None) if tokenizer is None else tokenizer)
    rows = read_prompts(prompts, tokenizers.read, source=isinstance(model, TranslatesText), begin=begin)
    check_tokens(rows, read_vocab(model))
    if decoding.crop:
        rows = crop_prompts(model, rows, decoding)
    return DecodeJob(model, TokenPrompts(rows), decoding, tokenizers.write, batch_size=batch, streaming=streaming)


class ReadWriteTokenizers(NamedTuple):
    """The tokenizer of the prompts or sources, and that of the generated text."""

    read: TokenizerProtocol | None
    write: TokenizerProtocol | None


def read_write_tokenizers(tokenizer: TokenizerChoice | None) -> ReadWriteTokenizers:
    """The tokenizers of both sides; a single tokenizer is used for both."""
    return ReadWriteTokenizers(*(tokenizer if isinstance(tokenizer, tuple) else (tokenizer, tokenizer)))
