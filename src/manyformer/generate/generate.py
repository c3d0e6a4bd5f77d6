"""The verbs: `generate` for everything, `stream` to read along."""

from collections.abc import Callable, Iterator

from manyformer.errors import UserError
from manyformer.generate.decode_plan import DecodeJob, DecodePlan, TokenizerChoice, sides
from manyformer.generate.decoding import Decoding, decoding_from_options
from manyformer.generate.prompts import PromptBatch, check_tokens, new_token_limits, read_prompts
from manyformer.generate.protocol import GenerativeModelProtocol, TranslatesText
from manyformer.generate.result import GenerationResult, StreamPiece


def generate(
    model: GenerativeModelProtocol,
    prompts: PromptBatch,
    *,
    tokenizer: TokenizerChoice | None = None,
    decoding: Decoding | None = None,
    on_piece: Callable[[StreamPiece], None] | None = None,
    batch: int = 32,
    begin: bool = False,
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
) -> GenerationResult:
    """Let a language model go on from `prompts`, or an encoder-decoder answer them, `batch` rows at a time.

    A prompt is a string (with a `tokenizer`; a model loaded from a run may carry one), a list of ids or a tensor; one
    or a list of them. `begin` says that strings are the beginning of a document. The flat words are those of
    `decoding_from_options`; a `Decoding` says the same in objects. `on_piece` is called with each `StreamPiece` as it
    is written. An answer does not depend on the other rows. Raises UserError."""
    flat = decoding_from_options(
        max_new=max_new,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram=no_repeat_ngram,
        seed=seed,
        samples=samples,
        beam=beam,
        alpha=alpha,
        best=best,
        stop=stop,
        stop_ids=stop_ids,
        use_cache=use_cache,
    )
    if decoding is not None and flat != decoding_from_options():
        raise UserError("give either decoding= or single settings, not both")
    decoding, live = flat if decoding is None else decoding, on_piece is not None
    work = _work(model, prompts, decoding, tokenizer, batch, begin=begin, live=live)
    for piece in work:
        if on_piece is not None:
            on_piece(piece)
    return GenerationResult(tuple(work.answers), work.stats, tuple(work.seeds))


def stream(
    model: GenerativeModelProtocol,
    prompts: PromptBatch,
    decoding: Decoding,
    *,
    tokenizer: TokenizerChoice | None = None,
    batch: int = 32,
    begin: bool = False,
) -> Iterator[StreamPiece]:
    """The pieces of `generate` one by one, each as soon as it is written. Raises UserError at once, as `generate`."""
    return iter(_work(model, prompts, decoding, tokenizer, batch, begin=begin, live=True))


def _work(
    model: GenerativeModelProtocol,
    prompts: PromptBatch,
    decoding: Decoding,
    tokenizer: TokenizerChoice | None,
    batch: int,
    *,
    begin: bool,
    live: bool,
) -> DecodeJob:
    if not hasattr(model, "start"):
        kind = type(model).__name__
        raise UserError(f"a {kind} does not write: generate needs a language model or an encoder-decoder")
    if batch < 1:
        raise UserError(f"batch must be 1 or more rows, got {batch}")
    words = sides(getattr(model, "tokenizer", None) if tokenizer is None else tokenizer)
    rows = read_prompts(prompts, words.read, source=isinstance(model, TranslatesText), begin=begin)
    check_tokens(rows, model.vocab)
    return DecodeJob(
        DecodePlan(model, rows, new_token_limits(model, rows, decoding), decoding, words.write, live), batch
    )
