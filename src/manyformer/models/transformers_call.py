"""The keywords of Hugging Face's models, with their meaning, beside those of the library's own `forward`.

They are looked for at the door of a model alone: its layers know documents (`segments`) and no masks of padding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.core import PADDING_SEGMENT

TARGET_KEYWORDS = ("decoder_input_ids", "decoder_inputs_embeds")
INPUT_KEYWORDS = ("input_ids", "inputs_embeds", "attention_mask", "labels", *TARGET_KEYWORDS)
FLAGS = {
    "return_dict": (None, True),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, False),
    "past_key_values": (None,),
    "position_ids": (None,),
    "token_type_ids": (None,),
}
"""Further keywords, as wrappers pass them on, and the values that ask for nothing."""

KEYWORDS = frozenset((*INPUT_KEYWORDS, *FLAGS))


class TheirKeywords(NamedTuple):
    """How a kind of model is called: the keywords that it takes, its segments, and the shift of its labels."""

    keywords: frozenset[str]
    segments: str = "segments"
    is_causal: bool = False
    segments_place: int = 1


@dataclass(frozen=True)
class WrapperConfig:
    """What wrappers such as peft read of a model that generates: its vocabulary, and that it has no class of theirs."""

    vocab_size: int
    model_type: str = "manyformer"


CAUSAL = TheirKeywords(frozenset({"input_ids", "inputs_embeds", "attention_mask", "labels"}), is_causal=True)
ENCODER = TheirKeywords(frozenset({"input_ids", "inputs_embeds", "attention_mask", "labels"}))
ENCODER_DECODER = TheirKeywords(
    frozenset({"input_ids", "inputs_embeds", "attention_mask", "labels", *TARGET_KEYWORDS}),
    "source_segments",
    segments_place=2,
)
LABELS_ALONE = TheirKeywords(frozenset({"labels"}))
NO_KEYWORDS = TheirKeywords(frozenset())


def call_as_transformers(
    model: Any, forward: Callable[..., Any], form: TheirKeywords, inputs: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """The output of `forward` for these keywords; with labels, its loss is that of the task and all others.

    Raises UserError for what the model does not take."""
    theirs = {name: options.pop(name) for name in list(options) if name in KEYWORDS}
    for name, neutral in FLAGS.items():
        if name in theirs and not any(theirs[name] is value for value in neutral):
            remedy = {"output_attentions": "; watch= gives attention weights", "past_key_values": "; state= is its own"}
            raise UserError(f"a {type(model).__name__} takes no {name}{remedy.get(name, '')}; leave it out")
    theirs = {name: value for name, value in theirs.items() if value is not None and name in INPUT_KEYWORDS}
    for name in theirs:
        if name not in form.keywords:
            takes = ", ".join(sorted(form.keywords)) or "none of them"
            raise UserError(
                f"a {type(model).__name__} takes no {name}; of the keywords of transformers it takes {takes}"
            )
    inputs = _with_inputs(theirs, inputs, options)
    if "attention_mask" in theirs:
        options[form.segments] = _segments_of(theirs["attention_mask"], form, inputs, options)
    if form is ENCODER_DECODER:
        inputs = _with_target(model, theirs, inputs, options)
    output = forward(model, *inputs, **options)
    if "labels" in theirs:
        loss = _task_loss(output.logits, theirs["labels"], is_causal=form.is_causal)
        output = output._replace(loss=loss + output.loss)
    return output


def _with_inputs(theirs: dict[str, Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The positional inputs of `forward`, the first of which may be named."""
    named = [name for name in ("input_ids", "inputs_embeds") if name in theirs]
    if len(named) + bool(inputs) > 1:
        raise UserError("give tokens once: as the first argument, as input_ids or as inputs_embeds")
    if "input_ids" in theirs:
        return (theirs["input_ids"],)
    if "inputs_embeds" in theirs:
        return (_ids_of_vectors("inputs_embeds", theirs, options),)
    return inputs


def _with_target(
    model: Any, theirs: dict[str, Any], inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """The positional inputs of an encoder-decoder, the second of which may be named, or follows from the labels."""
    named = [name for name in TARGET_KEYWORDS if name in theirs]
    if len(named) + (len(inputs) > 1 or "target" in options) > 1:
        raise UserError(
            "give the target once: as the second argument, as decoder_input_ids or as decoder_inputs_embeds"
        )
    if not named and (len(inputs) > 1 or "target" in options):
        return inputs
    if not named:
        return (*inputs, _shifted_labels(model, theirs))
    if "decoder_input_ids" in theirs:
        return (*inputs, theirs["decoder_input_ids"])
    return (*inputs, _ids_of_vectors("decoder_inputs_embeds", theirs, options))


def _ids_of_vectors(name: str, theirs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Hand over the vectors under this name; ids, which then stand for their shape alone."""
    vectors = theirs[name]
    if vectors.ndim != 3 or not vectors.is_floating_point():
        raise UserError(
            f"{name} must be vectors (batch, length, dim), and these are {vectors.dtype} of shape "
            f"{tuple(vectors.shape)}"
        )
    options[name] = vectors
    return torch.zeros(vectors.shape[:2], dtype=torch.long, device=vectors.device)


def _segments_of(mask: Tensor, form: TheirKeywords, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The segments of a mask, 1 for a token and 0 for padding: one document in each row."""
    has_segments = len(inputs) > form.segments_place and inputs[form.segments_place] is not None
    if has_segments or options.get(form.segments) is not None:
        raise UserError(f"give attention_mask or {form.segments}, not both: each says what is padding")
    tokens = inputs[0]
    if mask.ndim != 2 or mask.shape[0] != tokens.shape[0] or mask.shape[1] < tokens.shape[1]:
        raise UserError(
            f"attention_mask has the shape {tuple(mask.shape)}; it must be (batch, length) for tokens of shape "
            f"{tuple(tokens.shape[:2])}"
        )
    # where a state continues rows, theirs covers the tokens before as well, whose padding the state knows
    if mask.shape[1] > tokens.shape[1] and options.get("state") is None and len(inputs) < 3:
        raise UserError(f"attention_mask has {mask.shape[1]} columns for {tokens.shape[1]} tokens and no state")
    return torch.where(mask[:, -tokens.shape[1] :].bool(), 0, PADDING_SEGMENT)


def _shifted_labels(model: Any, theirs: dict[str, Any]) -> Tensor:
    """The target that begins with the model's start token and goes on with the labels."""
    settings = model.generation
    if "labels" not in theirs or settings is None:
        raise UserError(f"a {type(model).__name__} needs a target: give decoder_input_ids or decoder_inputs_embeds")
    labels = theirs["labels"]
    start = torch.full_like(labels[:, :1], settings.start)
    return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORE_INDEX, settings.pad)], dim=1)


def _task_loss(logits: Tensor, labels: Tensor, *, is_causal: bool) -> Tensor:
    """The mean cross-entropy over the labels that are not -100; those of causal models are shifted here."""
    if labels.shape != logits.shape[:-1]:
        raise UserError(f"labels must have the shape {tuple(logits.shape[:-1])}, and these have {tuple(labels.shape)}")
    if is_causal:
        logits = logits[:, :-1]
        labels = labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX)
