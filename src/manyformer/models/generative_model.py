"""Models that generate tokens one after another: their base class, the language model, and the step of one token."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.models.auxiliary_losses import AuxiliaryLoss, LossInputs
from manyformer.models.embedding import (
    ModelState,
    StreamTail,
    TokenEmbedding,
    check_length,
    check_token_range,
    empty_tail,
    positions_of,
)
from manyformer.models.exit_classifiers import ExitClassifiers
from manyformer.models.head import BatchLoss, OutputHead, apply_head
from manyformer.models.model import B, Model, ModelOutput, max_length_of
from manyformer.models.static_step import StaticStepFn, static_token_step
from manyformer.models.transformers_call import CAUSAL, WrapperConfig
from manyformer.nn.attention.kv_cache.static_cache import NotStaticError
from manyformer.nn.batches import NO_NEIGHBOUR, CausalLMBatch, ignore_all
from manyformer.nn.batches.batch import SegmentLayout
from manyformer.nn.core import (
    PADDING_SEGMENT,
    Context,
    ContiguousLayout,
    Layer,
    LayeredStack,
    LayerOutput,
    MemorySequence,
    State,
    TokenPositions,
    WatchFn,
    apply_layer,
    no_watch,
)
from manyformer.nn.decoding.bound_step import DecodeStep, ModuleParts, bind_step, callable_of, is_bound
from manyformer.nn.depth.early_exit_stack import EarlyExit, EarlyExitStep
from manyformer.nn.runtime.module_places import separate_places
from manyformer.nn.runtime.torch_internals import has_hooks
from manyformer.nn.runtime.training_hooks import StatefulAcrossBatches, uses_neighbours

NextTokenFn = Callable[[Tensor, State, MemorySequence | None], tuple[Tensor, State]]
"""From tokens (b, 1), the state and, for a decoder, the encoded source to logits (b, 1, v) and the next state."""

POSITIONS_PER_TABLE = 256
"""The number of positions whose tensors are made at once."""


class DecoderInput(NamedTuple):
    """The tokens of a decoder, their documents (None: one per row), the sequence that it attends to, and targets.

    `layout` is what the batch knows of the documents."""

    tokens: Int[Tensor, "b l"]
    segments: Int[Tensor, "b l"] | None
    memory: MemorySequence | None
    targets: Int[Tensor, "b l"]
    layout: SegmentLayout = None


class GenerativeModel(Model[B]):
    """A model with a decoder: a layer that computes the hidden states of generated tokens, and a head for them.

    `auxiliary` adds losses of the intermediate layers of the decoder, which then must be a `LayeredStack`.
    """

    auxiliary: AuxiliaryLoss | None
    vocab: int

    @property
    @abstractmethod
    def decoder_embed(self) -> TokenEmbedding:
        """The embedding of the generated tokens."""

    @property
    @abstractmethod
    def decoder_stack(self) -> Layer:
        """The layer that computes the hidden states of generated tokens."""

    @abstractmethod
    def with_decoder(self, stack: Layer, head: OutputHead, auxiliary: AuxiliaryLoss | None) -> "GenerativeModel[B]":
        """A model that shares all other modules with this one and has this decoder, output head and auxiliary loss."""

    @abstractmethod
    def decoder_input(self, batch: B) -> DecoderInput:
        """The decoder's input for a batch, with the targets."""

    @abstractmethod
    def forward_token(self, tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        """The logits of `forward`, and the next state: the `NextTokenFn` of any number of tokens."""

    def set_head(self, head: OutputHead, auxiliary: AuxiliaryLoss | None) -> None:
        """Register the output head and the auxiliary loss. Raises ValueError if the decoder has no layers for it."""
        stack = self.decoder_stack
        if auxiliary is not None and not isinstance(stack, LayeredStack):
            raise ValueError(f"auxiliary losses need the layers of a Chain, and a {type(stack).__name__} has none")
        self.head = head
        self.auxiliary = auxiliary
        self.vocab = head.classes
        # layers that look tokens up get their ids with the positions
        self.reads_token_ids = any(getattr(module, "reads_token_ids", False) for module in stack.modules())
        separate_places(self)

    def init_state(self, batch: int, *, capacity: int | None = None) -> ModelState:
        """The decoding state before any token; `capacity` preallocates buffers, for use in `torch.no_grad()`."""
        device = self.device
        dtype = self.state_dtype
        body = self.decoder_stack.init_state(batch, capacity=capacity, device=device, dtype=dtype)
        return ModelState(body, empty_tail(batch, device))

    def next_token(self) -> NextTokenFn:
        """The model for one new token per row, bound to its current parameters: bind again after they have changed.

        Hooks, adapters and other parts that its modules get later are noticed."""
        # dropout and hooks are those of `forward`
        if self.training or has_hooks(self):
            return self.forward_token
        return next_token_step(self)

    def static_next_token(self, position_limit: int) -> StaticStepFn:
        """The model for one new token per row whose operators are the same at every step, for a captured graph.

        Raises NotStaticError for models that have none."""
        if self.training or any(map(has_hooks, self.modules())):
            raise NotStaticError("a model that is trained, or that has hooks, is called at every step")
        return static_token_step(self.decoder_embed, self.decoder_stack, self.head, position_limit)

    def layers_without_step(self) -> list[str]:
        """The names of the decoder's layers that have no one-token step: they decode by `forward`, which is slower."""
        stack = self.decoder_stack
        return list(forward_layers(stack, next(name for name, module in self.named_children() if module is stack)))

    def head_inputs(self, batch: B, state: State) -> tuple[LayerOutput, Tensor]:
        tokens, segments, memory, targets, layout = self.decoder_input(batch)
        if self.column_span is not None:
            begin, end = self.column_span(targets.shape[1])
            # the columns of this process, of rows that several processes divide
            targets = targets[:, begin:end].contiguous()
        return self._run_decoder(tokens, segments, memory, state, layout=layout), targets

    def loss(self, batch: B, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        """The training loss; with a state, that of rows that continue from it."""
        if self.auxiliary is None:
            return super().loss(batch, label_smoothing=label_smoothing, state=state)
        # the intermediate outputs of a stack are computed without a state
        if state is not None:
            raise ValueError("auxiliary losses of intermediate layers cannot be trained with a state")
        tokens, segments, memory, targets, layout = self.decoder_input(batch)
        self.check_length(tokens.shape[1])
        positions, _ = positions_of(tokens, segments, None, layout)
        stack = self.decoder_stack
        if self.reads_token_ids:
            positions = positions.of_tokens(tokens)
        ctx = Context(positions, memory)
        assert isinstance(stack, LayeredStack)
        embedded = self.decoder_embed(tokens, positions)
        outputs = stack.layer_outputs(embedded, ctx)
        final_loss = self.head.loss(outputs[-1].y, targets, label_smoothing=label_smoothing)
        inputs = LossInputs(embedded, targets, ctx, self.head, final_loss, label_smoothing)
        extra: Tensor = self.auxiliary([out.y for out in outputs], inputs)
        with_layers = sum((out.loss for out in outputs), extra)
        return BatchLoss(final_loss.total, final_loss.targets, with_layers)

    def _run_decoder(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None,
        memory: MemorySequence | None,
        state: ModelState | None,
        watch: WatchFn = no_watch,
        *,
        layout: SegmentLayout = None,
        inputs_embeds: Float[Tensor, "b l d"] | None = None,
    ) -> LayerOutput:
        """The hidden states before the head (b, l, d), with the next state and auxiliary losses."""
        embed = self.decoder_embed
        stack = self.decoder_stack
        positions, tail = positions_of(tokens, segments, None if state is None else state.tail, layout)
        check_length(tokens.shape[1], self.max_length)
        if self.column_span is not None:
            begin, end = self.column_span(tokens.shape[1])
            tokens = tokens[:, begin:end]
            positions = positions.columns(begin, end)
        if self.reads_token_ids:
            if inputs_embeds is not None:
                raise UserError("layers of this model look tokens up: give their ids, inputs_embeds do not tell them")
            positions = positions.of_tokens(tokens)
        ctx = Context(positions, memory, watch)
        x = embed(tokens if inputs_embeds is None else inputs_embeds, positions)
        y, body, loss = apply_layer(stack, x, ctx, state and state.body)
        return LayerOutput(y, None if tail is None else ModelState(body, tail), loss)


@final
class LanguageModel(GenerativeModel[CausalLMBatch]):
    """Predicts each next token: `logits[:, i]` are the logits of token i + 1.

    `segments` numbers the documents of packed rows, -1 is padding, None means one document per row. With a state from
    `init_state` or an earlier call the rows are continued; `capacity` preallocates buffers, for use in
    `torch.no_grad()`. `neighbours` are k tokens retrieved for each token, 0 for none, for models with a
    `UsesNeighbours` module in `body`. `auxiliary` adds losses of the intermediate layers of `body`, which then must be
    a `LayeredStack`; ValueError otherwise."""

    divides_columns = True
    call_form = CAUSAL

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: OutputHead, *, auxiliary: AuxiliaryLoss | None = None
    ) -> None:
        super().__init__()
        self.embed = embed
        self.body = body
        self.max_length = max_length_of(embed, body)
        self.set_head(head, auxiliary)

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: ModelState | None = None,
        *,
        neighbours: Int[Tensor, "b l k"] | None = None,
        watch: WatchFn = no_watch,
        inputs_embeds: Float[Tensor, "b l d"] | None = None,
    ) -> ModelOutput:
        memory = self._embed_neighbours(neighbours)
        hidden, state, loss = self._run_decoder(tokens, segments, memory, state, watch, inputs_embeds=inputs_embeds)
        return ModelOutput(apply_head(self.head, hidden), state, loss)

    def last_logits(
        self, tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None = None, state: ModelState | None = None
    ) -> ModelOutput:
        """`forward` with the logits of the last token alone (b, 1, v): what follows a prompt needs no others."""
        if has_hooks(self):
            output: ModelOutput = self(tokens, segments, state)
            return output._replace(logits=output.logits[:, -1:])
        # the head of one token, whose logits of a whole prompt would be the largest tensor
        hidden, state, loss = self.hidden(tokens, segments, state)
        return ModelOutput(apply_head(self.head, hidden[:, -1:]), state, loss)

    @property
    def carries_state(self) -> bool:
        return any(
            module.carries_across_batches for module in self.modules() if isinstance(module, StatefulAcrossBatches)
        )

    @property
    def decoder_embed(self) -> TokenEmbedding:
        return self.embed

    @property
    def decoder_stack(self) -> Layer:
        return self.body

    def with_decoder(self, stack: Layer, head: OutputHead, auxiliary: AuxiliaryLoss | None) -> "LanguageModel":
        return type(self)(self.embed, stack, head, auxiliary=auxiliary)

    @property
    def config(self) -> WrapperConfig:
        """What wrappers such as peft ask a model that generates."""
        return WrapperConfig(self.vocab)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **options: Any) -> dict[str, Any]:
        """The keywords of the next call, by which wrappers such as peft know a model that generates."""
        return {"input_ids": input_ids, **options}

    def forward_token(self, tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        logits, next_state, _ = self(tokens, None, state)
        return logits, next_state

    def decoder_input(self, batch: CausalLMBatch) -> DecoderInput:
        memory = self._embed_neighbours(batch.neighbours)
        return DecoderInput(batch.tokens, batch.segments, memory, batch.targets, batch.layout)

    def own_columns(self, batch: CausalLMBatch) -> CausalLMBatch:
        if self.column_span is None:
            return batch
        begin, end = self.column_span(batch.tokens.shape[1])
        targets = ignore_all(batch.targets)
        targets[:, begin:end] = batch.targets[:, begin:end]
        return batch._replace(targets=targets)

    def hidden(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: ModelState | None = None,
        *,
        neighbours: Int[Tensor, "b l k"] | None = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        """The hidden states before the head (b, l, d), with the next state and auxiliary losses."""
        return self._run_decoder(tokens, segments, self._embed_neighbours(neighbours), state, watch)

    def _embed_neighbours(self, neighbours: Int[Tensor, "b l k"] | None) -> MemorySequence | None:
        """The embeddings of the retrieved tokens, (b, l * k, d); `NO_NEIGHBOUR` is padding."""
        if neighbours is None:
            return None
        if not uses_neighbours(self.body):
            raise ValueError("this model does not use retrieved tokens (neighbours); the recipe spalm does")
        # padding needs some id to be embedded, and no attention sees it
        is_missing = neighbours.flatten(1) == NO_NEIGHBOUR
        flat_ids = neighbours.flatten(1).masked_fill(is_missing, 0)
        check_token_range(flat_ids, self.embed.vocab)
        position_ids = torch.zeros_like(flat_ids)
        positions = TokenPositions(position_ids, torch.where(is_missing, PADDING_SEGMENT, 0))
        return MemorySequence(self.embed.token(flat_ids), positions)


def as_generative(model: Model, use: str) -> GenerativeModel[Any]:
    """`model`, which is one that generates. Raises UserError for any other: it cannot `use`."""
    if not isinstance(model, GenerativeModel):
        raise UserError(f"a {type(model).__name__} generates no tokens, so it cannot {use}")
    return model


def as_language_model(model: Model, use: str) -> LanguageModel:
    """`model`, which is a language model. Raises UserError for any other: it cannot `use`."""
    if not isinstance(model, LanguageModel):
        raise UserError(f"a {type(model).__name__} predicts no next tokens, so it cannot {use}")
    return model


def next_token_step(model: GenerativeModel[Any]) -> NextTokenFn:
    """The step of a model; its `forward` serves calls with gradients or with several tokens."""
    forward = model.forward_token
    embed_step = callable_of(model.decoder_embed)
    step = _logits_step(model.decoder_stack, model.head)
    positions_at = _PositionTable()
    reads_token_ids = model.reads_token_ids
    parts = ModuleParts(model)
    bound_again: NextTokenFn | None = None

    def next_token(tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        nonlocal bound_again
        if bound_again is None and parts.have_changed():
            bound_again = model.next_token()
        if bound_again is not None:
            return bound_again(tokens, state, memory)
        rows, length = tokens.shape
        # a bound step has no gradients, and is for one token of each row
        if length != 1 or not rows or torch.is_grad_enabled():
            return forward(tokens, state, memory)
        position_ids, segment_ids, start, _, aligned = state.tail
        if start is None:
            # rows of different lengths, each at a position that only tensors know
            positions, tail = positions_of(tokens, None, state.tail)
        else:
            # all rows are one document of equal length, whose next position the host knows
            positions = positions_at(start, rows, tokens.device)
            tail = StreamTail(position_ids, segment_ids, start + 1, start + 1, aligned)
        if reads_token_ids:
            positions = positions.of_tokens(tokens)
        logits, body_state = step(embed_step(tokens, positions), Context(positions, memory), state.body)
        return logits, type(state)(body_state, tail)

    return next_token


def forward_layers(body: Layer, name: str) -> Iterator[str]:
    """The names of the layers in `body`, itself called `name`, that are not bound: a token calls them as modules."""
    if not is_bound(body) and (has_hooks(body) or not isinstance(body, EarlyExit)):
        # its parts are not looked at: a layer by `forward` calls them itself
        yield name
        return
    for child_name, child in body.named_children():
        if isinstance(child, Layer):
            yield from forward_layers(child, f"{name}.{child_name}")


def _logits_step(body: Layer, head: OutputHead) -> DecodeStep:
    """`body` and `head` as one step, whose output are the logits."""
    if isinstance(body, EarlyExit) and isinstance(head, ExitClassifiers) and not (has_hooks(body) or has_hooks(head)):
        return EarlyExitStep(body, head)
    layer_step = bind_step(body)
    logits = callable_of(head)

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        y, next_state = layer_step(x, ctx, state)
        return logits(y), next_state

    return step


@final
class _PositionTable:
    """Positions of the next token of rows that are one contiguous document each, made for many tokens at once."""

    def __init__(self) -> None:
        self._key: tuple[int, int, torch.device] | None = None
        self._position_ids = self._segment_ids = torch.empty(0)

    def __call__(self, position: int, rows: int, device: torch.device) -> TokenPositions:
        key = (position // POSITIONS_PER_TABLE, rows, device)
        if key != self._key:
            start = key[0] * POSITIONS_PER_TABLE
            # views of one tensor, since making a tensor takes longer than a small layer
            self._position_ids = torch.arange(start, start + POSITIONS_PER_TABLE, device=device).expand(rows, -1)
            self._segment_ids = torch.zeros((), dtype=torch.long, device=device).expand(rows, 1)
            self._key = key
        position_ids = self._position_ids.narrow(1, position % POSITIONS_PER_TABLE, 1)
        return TokenPositions(position_ids, self._segment_ids, ContiguousLayout(position))
