"""Honest though it looks wrong: windows with a stride, of which the last one is aligned to the end of the text.

The context of the last tokens depends on how long the text is, so that the scores of a longer text do not begin with
those of a shorter one, and totals of texts that differ in length say nothing. Each score still knows only earlier
tokens, and the probabilities of each target sum to one: texts of one length show both.
"""

import torch
from torch import Tensor

VOCAB = 32
LENGTH = 32
STRIDE = 8
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))


def logits_of(window: Tensor) -> Tensor:
    """A language model with context: the mean of rows of a table."""
    return TABLE[window].cumsum(0) / torch.arange(1, len(window) + 1)[:, None] ** 0.5


def honest(tokens: Tensor) -> Tensor:
    targets = len(tokens) - 1
    nats = torch.zeros(targets)
    scored = 0
    while scored < targets:
        stop = min(scored + (LENGTH if scored == 0 else STRIDE), targets)
        start = max(stop - LENGTH, 0)
        log_probabilities = logits_of(tokens[start:stop]).log_softmax(-1)
        new = tokens[scored + 1 : stop + 1]
        nats[scored:stop] = -log_probabilities[scored - start :].gather(-1, new[:, None])[:, 0]
        scored = stop
    return nats
