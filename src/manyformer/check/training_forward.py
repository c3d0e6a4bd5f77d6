"""Calls of a model in training mode that begin with the same buffers and the same random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.check.call_recorder import random_calls
from manyformer.check.isolation import restoring_attributes, restoring_buffers, training_mode
from manyformer.check.token_exchange import Forward
from manyformer.check.trial import ContractTrial, Untestable
from manyformer.model_summary import is_content_based
from manyformer.tasks import Inputs
from manyformer.training_hooks import run_post_step_updates


@contextmanager
def training_forward(
    trial: ContractTrial, first: Inputs, second: Inputs, *, after_step: bool = True
) -> Iterator[Forward]:
    """A context in training mode, with a function that computes logits as a training step does, with gradients.

    With `after_step` buffers are those after a first step, which may initialize them from its tokens, as k-means does;
    else those of a new model. All calls begin with the same ones.
    Raises Untestable if results for `first` and `second` cannot be compared: if two equal calls differ, or if the
    random numbers of a token follow from the content of other tokens.
    """
    module = trial.subject.module
    assert module is not None

    def forward(inputs: Inputs) -> Float[Tensor, "b *l v"]:
        with restoring_buffers(module), restoring_attributes(module), torch.enable_grad():
            return trial.subject(inputs).logits.detach()

    calls_in_evaluation = random_calls(forward, first)
    with training_mode(module):
        if after_step:
            trial.subject(first)
            run_post_step_updates(module, 1)
        if not torch.equal(forward(first), forward(first)):
            raise Untestable("two equal calls in training mode differ, although the random generators were seeded")
        if _draws_random_numbers(trial, forward, first):
            calls = random_calls(forward, first)
            if calls != random_calls(forward, second):
                raise Untestable("in training mode, the number of random numbers depends on token values")
            if is_content_based(module) and calls != calls_in_evaluation:
                raise Untestable("in training mode, random numbers are drawn for tokens that their values select")
        yield forward


def _draws_random_numbers(trial: ContractTrial, forward: Forward, inputs: Inputs) -> bool:
    """Whether another seed changes the logits; dropout with probability 0 draws random numbers without effect."""
    seed = trial.subject.seed
    expected = forward(inputs)
    trial.subject.seed = seed + 1
    actual = forward(inputs)
    trial.subject.seed = seed
    return not torch.equal(actual, expected)
