"""Hugging Face models as subjects, recognized by their attributes; this module never imports transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.subject import Subject, SubjectOutput, Untestable
from manyformer.base.libraries import reload_model, silence_transformers
from manyformer.nn.model_inputs import PADDING_SEGMENT, Inputs, State, tree_map

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class HFState(NamedTuple):
    """The cache, the mask of valid tokens so far (None: all), and the encoder output of an encoder-decoder."""

    cache: Any = None
    valid: Bool[Tensor, "b l"] | None = None
    memory: Float[Tensor, "b s d"] | None = None


LENGTH_FIELDS = (
    "max_position_embeddings",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_target_positions",
    "max_sequence_length",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "model_max_length",
    "context_length",
)
"""The fields of configurations that limit the length of sequences; a model has one of them, or several of one value."""


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What versions of transformers call the argument and the output that hold the cache, the last ones first."""


def is_hugging_face(module: nn.Module) -> bool:
    """Whether `module` is a Hugging Face model of tokens: it has a `config` and generates or takes `input_ids`."""
    # many a stranger's model has a `config` and a `generate` too, but only these name their main input
    if not hasattr(module, "config") or not hasattr(module, "main_input_name"):
        return False
    return module.main_input_name == "input_ids" or callable(getattr(module, "generate", None))


@final
class HuggingFace(Subject):
    """A causal language model or encoder-decoder, called as its own `generate` calls it, or a masked language model.

    What it raises is no broken promise: such contracts are not run.
    """

    runs_every_input = False
    labels: Int[Tensor, "b l"] | None = None

    def __init__(self, module: nn.Module) -> None:
        config: Any = module.config
        self.module = module
        self.name = type(module).__name__
        # wrapper classes accept any argument and pass it on; the parameters are those of the classes they derive from
        forwards = [vars(base)["forward"] for base in type(module).__mro__ if "forward" in vars(base)]
        self.forward_parameters = {name for forward in forwards for name in inspect.signature(forward).parameters}
        self.cache_name = next((name for name in CACHE_NAMES if name in self.forward_parameters), None)
        self.takes_source = bool(getattr(config, "is_encoder_decoder", False))
        if hasattr(config, "get_text_config"):
            text_config = config.get_text_config(decoder=True)
        else:
            text_config = config
        tables = _position_tables(module)
        self.first_position = _first_position(module, tables)
        limits = [limit for name in LENGTH_FIELDS if isinstance(limit := getattr(text_config, name, None), int)]
        # some families say with -1 that there is no limit
        limits = [limit for limit in limits if limit > 0]
        if limits:
            self.max_length = min(limits) - self.first_position
        else:
            self.max_length = None
        self.token_ids = _plain_tokens(text_config).to(next(module.parameters()).device)
        # the encoders number positions by column
        self.source_sides = ("right",)
        counts_columns = bool(tables) and "position_ids" not in self.forward_parameters
        generates = callable(getattr(module, "generate", None))
        reasons = {
            "incremental_decoding": self.cache_name is not None or "its forward takes no cache",
            "padding-left": not counts_columns or "it numbers positions by column and takes no position ids",
            "causal": _is_causal(config, generates=generates),
            "cross_attention": self.takes_source or "it reads one sequence only",
            "targets": "labels" in self.forward_parameters or "its forward takes no labels",
        }
        if self.takes_source:
            reasons["padding-left"] = "decoders of Hugging Face models are padded on the right only"
        reasons["padding-state"] = reasons["padding-left"]
        self.not_promised = NOT_PROMISED | {name: reason for name, reason in reasons.items() if isinstance(reason, str)}

    def logits_with_targets(self, inputs: Inputs, targets: Int[Tensor, "b l"]) -> Float[Tensor, "b l v"]:
        self.labels = targets
        try:
            return self(inputs).logits
        finally:
            self.labels = None

    def forward(self, inputs: Inputs, state: State = None) -> SubjectOutput:
        assert self.module is not None
        # without a state this is one whole pass, which a cache would only slow down
        past: HFState = HFState() if state is None else state
        length = inputs.tokens.shape[1]
        valid = None
        if inputs.segments is not None:
            valid = inputs.segments != PADDING_SEGMENT
        if past.valid is not None:
            if valid is None:
                # continuations are unpadded, but the mask covers the cache as well
                new_valid = torch.ones_like(inputs.tokens, dtype=torch.bool)
            else:
                new_valid = valid
            valid = torch.cat([past.valid, new_valid], dim=1)
        arguments: dict[str, Any] = {"use_cache": state is not None}
        if self.cache_name is not None and past.cache is not None:
            arguments[self.cache_name] = past.cache
        prefix = "decoder_" if self.takes_source else ""
        arguments[f"{prefix}input_ids"] = inputs.tokens
        if valid is not None:
            arguments[f"{prefix}attention_mask"] = valid.long()
            # padding on the right needs no position ids, and some models compute theirs in another way
            follows_padding = bool((valid.long().diff(dim=1) > 0).any())
            if follows_padding and not self.takes_source and "position_ids" in self.forward_parameters:
                position_ids = self.first_position + (valid.long().cumsum(1) - 1).clamp(min=0)
                # the ids of the new tokens alone: those of the cache are already in their keys
                arguments["position_ids"] = position_ids[:, -length:]
        if self.takes_source and past.memory is None:
            arguments["input_ids"] = inputs.source
        elif self.takes_source:
            arguments["encoder_outputs"] = self.encoder_output_class(last_hidden_state=past.memory)
        if inputs.source_segments is not None:
            arguments["attention_mask"] = (inputs.source_segments != PADDING_SEGMENT).long()
        # encoders do not take it, and some refuse unknown arguments
        if "use_cache" not in self.forward_parameters:
            del arguments["use_cache"]
        if self.labels is not None:
            arguments["labels"] = self.labels
        out = self.module(**arguments)
        # a bare encoder or a classifier of sequences
        if getattr(out, "logits", None) is None or out.logits.ndim != 3 or out.logits.shape[1] != length:
            raise Untestable("its forward gives no logits for each token")
        cache = None
        if self.cache_name is not None:
            cache = getattr(out, self.cache_name, None)
        return SubjectOutput(out.logits, HFState(cache, valid, past.memory))

    def init_state(self, inputs: Inputs, *, capacity: int | None = None) -> State:
        if not self.takes_source:
            return HFState()
        assert self.module is not None
        mask = None
        if inputs.source_segments is not None:
            mask = (inputs.source_segments != PADDING_SEGMENT).long()
        encoder: Any = self.module.get_encoder()  # type: ignore[operator]
        encoded = encoder(input_ids=inputs.source, attention_mask=mask)
        # each family has its own class of encoder outputs, and reads its fields by name
        self.encoder_output_class = type(encoded)
        return HFState(memory=encoded.last_hidden_state)

    def reorder(self, state: State, index: Sequence[int]) -> State:
        rows = torch.tensor(index, device=self.token_ids.device)
        # a cache of transformers reorders itself in place, and tree_map leaves it as it is
        if hasattr(state.cache, "reorder_cache"):
            state.cache.reorder_cache(rows)
        return tree_map(lambda t: t.index_select(0, rows), state)

    def session(self) -> AbstractContextManager[None]:
        return silence_transformers()

    def saved_copy(self) -> Self:
        assert self.module is not None
        with TemporaryDirectory() as folder:
            self.module.save_pretrained(folder)  # type: ignore[operator]
            loaded: nn.Module = reload_model(type(self.module), folder)
        return type(self)(loaded.to(self.token_ids.device).eval())


NOT_PROMISED = {
    "packing": "Hugging Face models take no document numbers",
    "ragged": "Hugging Face's generate pads prompts on the left, and only prompts",
    "capacity": "static caches of Hugging Face are for compiled generation",
    "rewind": "caches of Hugging Face change in place",
    "loss": "the loss of Hugging Face models shifts labels itself",
    "spec": "it was not built from a recipe",
}


BOTH_SIDES = {"causal": False, "attn_type": "bi"}
"""The settings of XLM and its relatives, and of XLNet, with which models that generate attend to both sides."""


def _is_causal(config: Any, *, generates: bool) -> bool | str:
    """True for a model that generates; for others, why they attend to both sides."""
    if not generates:
        return "it does not generate, and attends to both sides"
    for name, value in BOTH_SIDES.items():
        if getattr(config, name, None) == value:
            return f"its configuration has {name}={value!r}: it attends to both sides"
    return True


def _position_tables(module: nn.Module) -> list[nn.Module]:
    """The tables of absolute positions."""
    names = ("position_embeddings", "embed_positions", "wpe")
    return [table for name, table in module.named_modules() if name.rpartition(".")[2] in names]


def _first_position(module: nn.Module, tables: list[nn.Module]) -> int:
    """The position id of the first token: some tables begin with rows for padding, some buffers of ids with 2."""
    first_ids = [0]
    for table in tables:
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            first_ids.append(table.padding_idx + 1)
    for name, ids in module.named_buffers():
        if name.rpartition(".")[2] == "position_ids":
            first_ids.append(int(ids.flatten()[0]))
    return max(first_ids)


def _plain_tokens(config: Any) -> Tensor:
    """All token ids except the special ones, which some models treat differently."""
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith("_token_id"):
            special |= set(value if isinstance(value, list) else [value])
    plain_ids = [token for token in range(config.vocab_size) if token not in special]
    return torch.tensor(plain_ids if len(plain_ids) > 1 else range(config.vocab_size))
