"""The decoding state of this library's models as a cache of `transformers`."""

from typing import Any

from torch import Tensor
from transformers import Cache

from manyformer.core import State, tree_map


class DecodingCache(Cache):
    """Holds the state of a model after `length` tokens; rows are reordered, repeated and selected in all its tensors.

    A state cannot be shortened, because not every recipe keeps what it has read."""

    is_compileable = False

    def __init__(self, state: State) -> None:
        super().__init__(layers=[])
        self.state, self.length = state, 0

    def advance(self, state: State, count: int) -> None:
        """Replace the state by the one after `count` more tokens."""
        self.state, self.length = state, self.length + count

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state = tree_map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)), self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.state = tree_map(lambda tensor: tensor.repeat_interleave(repeats, dim=0), self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.state = tree_map(lambda tensor: tensor[indices.to(tensor.device)], self.state)

    def crop(self, max_length: int) -> None:
        raise NotImplementedError(
            "the states of manyformer's models cannot be shortened, which assisted generation needs: leave it out"
        )

    def reset(self) -> None:
        raise NotImplementedError("the states of manyformer's models are not reset: call generate without a cache")
