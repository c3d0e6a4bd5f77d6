"""Attention of a model to a recording, along time."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.errors import UserError
from manyformer.generate import SourceBatch, answer_sources
from manyformer.generate.protocol import TokenizerProtocol
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.tasks import EncodedText, TextPass
from manyformer.tasks.translation import decoder_pass
from manyformer.training_hooks import eval_mode
from manyformer.view.attention_maps import AttentionMap, pass_maps
from manyformer.view.text_passes import token_labels


def sound_maps(
    model: Any,
    frames: Float[Tensor, "1 f m"],
    tokenizer: TokenizerProtocol,
    *,
    frame_seconds: float,
    decodes: bool,
    answer: str | None = None,
) -> list[AttentionMap]:
    """The attention weights of a model for a recording; tokens of sound are labelled with their seconds.

    A model that `decodes` writes `answer`, or its own text. Raises UserError for an answer to another model."""
    if answer is not None and not decodes:
        raise UserError("only an encoder-decoder writes an answer; this model labels the sound itself")
    embed: FrameEmbedding = model.embed_source if decodes else model.embed
    times = [frame * frame_seconds for frame in range(0, frames.shape[1], 2**embed.halvings)]
    labels = tuple(f"{seconds:.2f}" for seconds in times)
    encode = model.encode if decodes else model
    with torch.no_grad(), eval_mode(model):
        passes = [TextPass(lambda watch: encode(frames, watch=watch), labels, len(labels))]
        if decodes:
            passes.append(decoder_pass(model, frames, labels, _read_answer(model, frames, tokenizer, answer)))
        return [attention for text_pass in passes for attention in pass_maps(model, text_pass)]


def _read_answer(
    model: Any, frames: Float[Tensor, "1 f m"], tokenizer: TokenizerProtocol, answer: str | None
) -> EncodedText:
    """The tokens of an answer, by default the one that the model writes."""
    if answer is None:
        rows = answer_sources(model, SourceBatch(frames, None), tokenizer=(tokenizer, tokenizer)).rows
        ids = list(rows[0][0].tokens)
    else:
        ids = list(tokenizer.encode(answer))
    return EncodedText(ids, tokenizer, partial(token_labels, tokenizer=tokenizer))
