"""Hugging Face models as subjects, recognized by their attributes; this module never imports transformers."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.check.subject import Subject, SubjectOutput
from manyformer.core import PADDING_SEGMENT, State, tree_map
from manyformer.tasks import Inputs


class HFState(NamedTuple):
    """The cache, the mask of valid tokens so far (None: all), and the encoder output of an encoder-decoder."""

    cache: Any = None
    valid: Bool[Tensor, "b l"] | None = None
    memory: Float[Tensor, "b s d"] | None = None


def is_hugging_face(module: nn.Module) -> bool:
    """Whether `module` is a generative Hugging Face model: it has a `config` and a method `generate`."""
    return hasattr(module, "config") and callable(getattr(module, "generate", None))


@final
class HuggingFace(Subject):
    """A causal language model or encoder-decoder, called as its own `generate` calls it."""

    def __init__(self, module: nn.Module) -> None:
        config: Any = module.config
        self.module, self.name = module, type(module).__name__
        # wrapper classes accept any argument and pass it on; the parameters are those of the classes they derive from
        forwards = [vars(base)["forward"] for base in type(module).__mro__ if "forward" in vars(base)]
        self.forward_parameters = {name for forward in forwards for name in inspect.signature(forward).parameters}
        self.takes_source = bool(getattr(config, "is_encoder_decoder", False))
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.token_ids = _plain_tokens(config).to(next(module.parameters()).device)
        self.not_promised = dict(NOT_PROMISED)
        if "past_key_values" not in self.forward_parameters:
            self.not_promised["incremental_decoding"] = "its forward takes no past_key_values"
        # the encoders number positions by column
        self.source_sides = ("right",)
        if self.takes_source:
            del self.not_promised["cross_attention"]
            # the decoders number positions by column and take no position ids
            reason = "decoders of Hugging Face models are padded on the right only"
            self.not_promised |= {"padding-left": reason, "padding-state": reason}

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert self.module is not None
        past: HFState = HFState() if state is None else state
        length = inputs.tokens.shape[1]
        valid = None if inputs.segments is None else inputs.segments != PADDING_SEGMENT
        if past.valid is not None:
            new_valid = torch.ones_like(inputs.tokens, dtype=torch.bool) if valid is None else valid
            valid = torch.cat([past.valid, new_valid], dim=1)
        arguments: dict[str, Any] = {"use_cache": state is not None}
        if past.cache is not None:
            arguments["past_key_values"] = past.cache
        prefix = "decoder_" if self.takes_source else ""
        arguments[f"{prefix}input_ids"] = inputs.tokens
        if valid is not None:
            arguments[f"{prefix}attention_mask"] = valid.long()
            if not self.takes_source and "position_ids" in self.forward_parameters:
                arguments["position_ids"] = (valid.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
        if self.takes_source:
            arguments |= {"input_ids": inputs.source} if past.memory is None else {"encoder_outputs": (past.memory,)}
            if inputs.source_segments is not None:
                arguments["attention_mask"] = (inputs.source_segments != PADDING_SEGMENT).long()
        out = self.module(**arguments)
        return SubjectOutput(out.logits, HFState(getattr(out, "past_key_values", None), valid, past.memory))

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        if not self.takes_source:
            return HFState()
        assert self.module is not None
        mask = None if inputs.source_segments is None else (inputs.source_segments != PADDING_SEGMENT).long()
        encoder: Any = self.module.get_encoder()  # type: ignore[operator]
        return HFState(memory=encoder(input_ids=inputs.source, attention_mask=mask).last_hidden_state)

    def reorder(self, state: State, index: Sequence[int]) -> State:
        rows = torch.tensor(index, device=self.token_ids.device)
        if hasattr(state.cache, "reorder_cache"):
            state.cache.reorder_cache(rows)
        return tree_map(lambda t: t.index_select(0, rows), state)

    def session(self) -> AbstractContextManager[None]:
        return silence_transformers()

    def save_to(self, folder: str) -> None:
        assert self.module is not None
        self.module.save_pretrained(folder)  # type: ignore[operator]

    def copy_from(self, folder: str) -> Self:
        loaded: nn.Module = type(self.module).from_pretrained(folder)  # type: ignore[union-attr]
        return type(self)(loaded.to(self.token_ids.device).eval())


NOT_PROMISED = {
    "cross_attention": "it reads one sequence only",
    "packing": "Hugging Face models take no document numbers",
    "ragged": "Hugging Face's generate pads prompts on the left, and only prompts",
    "capacity": "static caches of Hugging Face are for compiled generation",
    "rewind": "caches of Hugging Face change in place",
    "loss": "the loss of Hugging Face models shifts labels itself",
    "spec": "it was not built from a recipe",
}


@contextmanager
def silence_transformers() -> Iterator[None]:
    """A context without warnings and progress bars of transformers, if it is imported."""
    library: Any = sys.modules.get("transformers")
    if library is None:
        yield
        return
    logging = library.utils.logging
    level, had_progress_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_progress_bars:
            logging.enable_progress_bar()


def _plain_tokens(config: Any) -> Tensor:
    """All token ids except the special ones, which some models treat differently."""
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith("_token_id"):
            special |= set(value if isinstance(value, list) else [value])
    plain_ids = [token for token in range(config.vocab_size) if token not in special]
    return torch.tensor(plain_ids if len(plain_ids) > 1 else range(config.vocab_size))
