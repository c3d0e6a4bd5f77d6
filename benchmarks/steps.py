"""One training step of any model: loss, gradients, fused AdamW. Same work for everybody."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from frame import Step
from torch import Tensor, nn

from manyformer.models import MaskedLM, Model
from manyformer.nn.batches import CausalLMBatch, MaskedLMBatch


def language_step(model: nn.Module, tokens: Tensor) -> Step:
    """Every token is to be told from what a model makes of the one before it, or, masked, of all."""
    return train(model, language_loss(model, tokens))


def language_loss(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    """The loss of a language model on these tokens, each of which is predicted from those before it."""
    targets = tokens.roll(-1, 1)

    def loss() -> Tensor:
        if isinstance(model, Model):
            batch = (
                MaskedLMBatch(tokens, targets, None) if isinstance(model, MaskedLM) else CausalLMBatch(tokens, targets)
            )
            return _mean(model, batch)
        found = model(tokens)
        return F.cross_entropy(getattr(found, "logits", found).flatten(0, 1), targets.flatten())

    return loss


def rows_step(model: Model, rows: Iterator[CausalLMBatch]) -> Step:
    """Each step takes the next rows."""
    return train(model, lambda: _mean(model, next(rows)))


def masked_step(model: nn.Module, tokens: Tensor, targets: Tensor, **words: Any) -> Step:
    """Chosen tokens are to be told; `words` are for a model of `transformers`."""

    def loss() -> Tensor:
        if isinstance(model, Model):
            return _mean(model, MaskedLMBatch(tokens, targets))
        return model(tokens, labels=targets, **words).loss  # type: ignore[no-any-return]

    return train(model, loss)


def train(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """A step that makes this loss smaller."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        loss().backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def _mean(model: Model, batch: Any) -> Tensor:
    found = model.loss(batch)
    return found.total / found.targets
