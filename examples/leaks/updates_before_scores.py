"""A model that learns while it is scored takes its step on a chunk before it scores that chunk.

Test-time training is honest if each token is scored by weights that have not seen it. Met as chunks that are trained on
and then scored, as several passes over the text of which the last one counts, and as a calibration on the whole stream.
Mend: score, then step.
"""

import torch
from torch import Tensor

FAILS = "causal-stream"
VOCAB = 32
CHUNK = 16
LEARNING_RATE = 0.5


def score_chunks(tokens: Tensor, *, step_first: bool) -> Tensor:
    logits = torch.zeros(VOCAB)
    nats = []
    for chunk in tokens[1:].split(CHUNK):
        # the gradient of the mean loss of a distribution without context
        observed = torch.bincount(chunk, minlength=VOCAB) / len(chunk)
        stepped = logits - LEARNING_RATE * VOCAB**0.5 * (logits.softmax(-1) - observed)
        used = stepped if step_first else logits
        nats.append(-used.log_softmax(-1)[chunk])
        logits = stepped
    return torch.cat(nats)


def faulty(tokens: Tensor) -> Tensor:
    return score_chunks(tokens, step_first=True)


def sound(tokens: Tensor) -> Tensor:
    return score_chunks(tokens, step_first=False)
