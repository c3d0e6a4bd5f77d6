"""Trees for tokens that come without: they follow from the tokens, so that padding and packing move them along."""

import torch
from jaxtyping import Int
from torch import Tensor

from manyformer.core import PADDING_SEGMENT
from manyformer.dependency_trees import NO_NODE, ROOT, preorder_columns


@torch.compiler.disable  # type: ignore[untyped-decorator]
def grow(tokens: Int[Tensor, "b l"], segments: Int[Tensor, "b l"] | None) -> Int[Tensor, "b l 3"]:
    """A tree for each document, as `preorder_columns` tells it; the first of several tokens is in none, as a start
    token is.
    """
    found = torch.full((*tokens.shape, 3), NO_NODE)
    owners = (torch.zeros_like(tokens) if segments is None else segments).tolist()
    for row, numbers in enumerate(tokens.tolist()):
        for document in set(owners[row]) - {PADDING_SEGMENT}:
            columns = [column for column, owner in enumerate(owners[row]) if owner == document]
            words = columns[1:] or columns
            found[row, words] = torch.from_numpy(preorder_columns(_heads([numbers[column] for column in words])))
    return found.to(tokens.device)


def _heads(numbers: list[int]) -> list[int]:
    """Each word hangs on one of those before it in an order of their own, chosen by its token."""
    order = sorted(range(1, len(numbers) + 1), key=lambda word: (numbers[word - 1] * word % 7, word))
    heads = [ROOT] * len(numbers)
    for place, word in enumerate(order[1:], 1):
        heads[word - 1] = order[max(0, place - 1 - numbers[word - 1] % 3)]
    return heads
