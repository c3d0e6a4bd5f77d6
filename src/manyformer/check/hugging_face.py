"""Hugging Face models as subjects, known by what they can do; transformers itself is never imported here."""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.check.subject import Inputs, Subject, SubjectOutput
from manyformer.core import PADDING_SEGMENT, State, tree_map


class HFState(NamedTuple):
    """Their cache, which tokens so far were real (None: all), and the encoder's output of an encoder-decoder."""

    cache: Any = None
    real: Bool[Tensor, "b l"] | None = None
    memory: Float[Tensor, "b s d"] | None = None


def is_hugging_face(module: nn.Module) -> bool:
    """Whether `module` is one of their generating models: it has a `config` and can `generate`."""
    return hasattr(module, "config") and callable(getattr(module, "generate", None))


@final
class HuggingFace(Subject):
    """A causal language model or encoder-decoder, called as their own `generate` calls it."""

    def __init__(self, module: nn.Module) -> None:
        config: Any = module.config
        self.module, self.name = module, type(module).__name__
        # wrappers around a model take anything and pass it on; what arrives is told by the class below
        forwards = [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
        self.takes = frozenset(name for forward in forwards for name in inspect.signature(forward).parameters)
        self.takes_source = bool(getattr(config, "is_encoder_decoder", False))
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.token_ids = _plain_tokens(config).to(next(module.parameters()).device)
        self.not_promised = {
            name: why for name, why in REFUSED.items() if name != "cross_attention" or not self.takes_source
        }
        if "past_key_values" not in self.takes:
            self.not_promised["incremental_decoding"] = "its forward takes no past_key_values"
        # their encoders number positions by column
        self.source_sides = ("right",)
        if self.takes_source:
            # their decoders number positions by column and take no other numbers
            why = "their decoders are padded on the right only"
            self.not_promised |= {"padding-left": why, "padding-state": why}

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert self.module is not None
        past: HFState = HFState() if state is None else state
        length = inputs.tokens.shape[1]
        real = None if inputs.segments is None else inputs.segments != PADDING_SEGMENT
        if past.real is not None:
            new = torch.ones_like(inputs.tokens, dtype=torch.bool) if real is None else real
            real = torch.cat([past.real, new], dim=1)
        call: dict[str, Any] = {"use_cache": state is not None}
        if past.cache is not None:
            call["past_key_values"] = past.cache
        tokens, mask = ("decoder_input_ids", "decoder_attention_mask") if self.takes_source else NAMES
        call[tokens] = inputs.tokens
        if real is not None:
            call[mask] = real.long()
            if not self.takes_source and "position_ids" in self.takes:
                call["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
        memory = self._source(inputs, past, call)
        out = self.module(**call)
        return SubjectOutput(out.logits, HFState(getattr(out, "past_key_values", None), real, memory))

    def _source(self, inputs: Inputs, past: HFState, call: dict[str, Any]) -> Tensor | None:
        """Hand over the source, encoded where a state has it; the encoder's output where there is a state."""
        if not self.takes_source:
            return None
        if inputs.source_segments is not None:
            call["attention_mask"] = (inputs.source_segments != PADDING_SEGMENT).long()
        if past.memory is not None:
            call["encoder_outputs"] = (past.memory,)
        else:
            call["input_ids"] = inputs.source
        return past.memory

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
        return tree_map(lambda t: t.index_select(0, rows), state)

    def session(self) -> AbstractContextManager[None]:
        return quiet()

    def save_to(self, folder: str) -> None:
        assert self.module is not None
        self.module.save_pretrained(folder)  # type: ignore[operator]

    def copy_from(self, folder: str) -> Self:
        made: nn.Module = type(self.module).from_pretrained(folder)  # type: ignore[union-attr]
        return type(self)(made.to(self.token_ids.device).eval())


NAMES = ("input_ids", "attention_mask")

REFUSED = {
    "cross_attention": "it reads one sequence only",
    "packing": "Hugging Face models take no document numbers",
    "ragged": "their generate pads prompts on the left, and only prompts",
    "capacity": "their static caches are for compiled generation",
    "rewind": "their caches change in place",
    "loss": "their loss shifts labels by itself",
    "spec": "no recipe made it",
}


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and progress bars of theirs inside, where their library is loaded at all."""
    library: Any = sys.modules.get("transformers")
    if library is None:
        yield
        return
    logging = library.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _plain_tokens(config: Any) -> Tensor:
    """All tokens but the special ones, which some of their models treat apart."""
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith("_token_id"):
            special |= set(value if isinstance(value, list) else [value])
    kept = [token for token in range(config.vocab_size) if token not in special]
    return torch.tensor(kept if len(kept) > 1 else range(config.vocab_size))
