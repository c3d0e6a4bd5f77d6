"""The base class of models that generate tokens one after another."""

from abc import abstractmethod

from manyformer.core import Layer, State
from manyformer.models.auxiliary_losses import AuxiliaryLoss
from manyformer.models.model import B, Model
from manyformer.models.next_token_step import NextTokenFn, forward_layers
from manyformer.models.output_head import OutputHead


class GenerativeModel(Model[B]):
    """A model with a decoder: a layer that computes the hidden states of generated tokens, and a head for them.

    `auxiliary` adds losses of the intermediate layers of the decoder.
    """

    head: OutputHead
    auxiliary: AuxiliaryLoss | None
    vocab: int

    @property
    @abstractmethod
    def decoder_stack(self) -> Layer:
        """The layer that computes the hidden states of generated tokens."""

    @property
    @abstractmethod
    def decoder_width(self) -> int:
        """The width of the residual stream of `decoder_stack`."""

    @abstractmethod
    def with_decoder(self, stack: Layer, head: OutputHead, auxiliary: AuxiliaryLoss | None) -> "GenerativeModel[B]":
        """A model that shares all other modules with this one and has this decoder, output head and auxiliary loss."""

    @abstractmethod
    def init_state(self, batch: int, *, capacity: int | None = None) -> State:
        """The decoding state before any token; `capacity` preallocates buffers, for use in `torch.no_grad()`."""

    @abstractmethod
    def next_token(self) -> NextTokenFn:
        """The model for one new token per row, bound to its current parameters: bind again after they have changed."""

    def layers_without_step(self) -> list[str]:
        """The names of the decoder's layers that have no one-token step: they decode by `forward`, which is slower."""
        stack = self.decoder_stack
        return list(forward_layers(stack, next(name for name, module in self.named_children() if module is stack)))
