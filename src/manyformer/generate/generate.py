"""`generate` decodes all prompts and returns the results; `stream` yields pieces while they are generated."""

from collections.abc import Callable, Iterator
from typing import Unpack

from manyformer.decoding_options import DecodingOptions
from manyformer.errors import UserError
from manyformer.generate.decode_job import DecodeJob, TokenizerChoice, read_write_tokenizers
from manyformer.generate.decoding import Decoding, decoding_from_options
from manyformer.generate.joint_ranking import joint_ranking
from manyformer.generate.prompts import (
    PromptBatch,
    SourceBatch,
    SourcePrompts,
    TokenPrompts,
    check_tokens,
    crop_prompts,
    read_prompts,
    read_vocab,
)
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
    begin: bool | None = None,
    **options: Unpack[DecodingOptions],
) -> GenerationResult:
    """Continue `prompts` with a language model, or translate them with an encoder-decoder, `batch` rows at a time.

    `prompts` is one prompt or a list of them: strings (with a `tokenizer`, which a model loaded from a run has itself),
    lists of token ids or tensors. `begin` puts the start token in front of strings; None does where the tokenizer of an
    imported model does. The options are those of
    `decoding_from_options`; `decoding` gives them as one object instead. `on_piece` is called with each `StreamPiece`
    as soon as it is decoded. The result of a row does not depend on the other rows. Raises UserError."""
    from_options = decoding_from_options(**options)
    if decoding is not None and from_options != decoding_from_options():
        raise UserError("give either decoding= or single settings, not both")
    decoding = from_options if decoding is None else decoding
    streaming = on_piece is not None
    job = _decode_job(model, prompts, decoding, tokenizer, batch, begin=begin, streaming=streaming)
    for piece in job:
        if on_piece is not None:
            on_piece(piece)
    return GenerationResult(tuple(job.answers), job.stats, tuple(job.seeds))


def answer_sources(
    model: TranslatesText,
    sources: SourceBatch,
    *,
    tokenizer: TokenizerChoice | None = None,
    decoding: Decoding | None = None,
    batch: int = 32,
) -> GenerationResult:
    """What an encoder-decoder writes for sources that are no tokens, such as images, `batch` rows at a time.

    The text is that of the target's `tokenizer`, by default the model's. Raises UserError."""
    tokenizers = read_write_tokenizers(getattr(model, "tokenizer", None) if tokenizer is None else tokenizer)
    decoding = Decoding() if decoding is None else decoding
    ranking = joint_ranking(model, decoding)
    job = DecodeJob(model, SourcePrompts(sources), ranking.decoding, tokenizers.write, batch_size=batch)
    for _ in job:
        pass
    return GenerationResult(tuple(ranking.rank(sources, job.answers)), job.stats, tuple(job.seeds))


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
    if not (hasattr(model, "init_state") and hasattr(model, "vocab")):
        kind = type(model).__name__
        raise UserError(f"a {kind} does not generate text: generate needs a language model or an encoder-decoder")
    if batch < 1:
        raise UserError(f"batch must be 1 or more rows, got {batch}")
    tokenizers = read_write_tokenizers(getattr(model, "tokenizer", None) if tokenizer is None else tokenizer)
    rows = read_prompts(prompts, tokenizers.read, source=isinstance(model, TranslatesText), begin=begin)
    check_tokens(rows, read_vocab(model))
    if decoding.crop:
        rows = crop_prompts(model, rows, decoding)
    return DecodeJob(model, TokenPrompts(rows), decoding, tokenizers.write, batch_size=batch, streaming=streaming)
