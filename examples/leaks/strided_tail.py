"""Windows that advance by a stride count the last targets again and again.

A window has `LENGTH` tokens and scores its last `STRIDE`; near the end of the text windows get shorter, and each scores
its last ones anew. The mean is that of other targets than those of the text. Met in `eval_val_sliding` of records of
parameter-golf; with 62 million tokens it is nothing, with a thousand it is several percent. Mend: stop at the first
window that reaches the end.
"""

import torch
from torch import Tensor, nn

FAILS = "counted"
VOCAB = 64
LENGTH = 256
STRIDE = 64


def mean_nats(model: nn.Module, tokens: Tensor, starts: list[int]) -> float:
    total = 0.0
    count = 0
    for start in starts:
        window = tokens[start : start + LENGTH + 1]
        logits = model(window[None, :-1])[0].double()
        nats = nn.functional.cross_entropy(logits, window[1:], reduction="none")
        scored = nats if start == 0 else nats[-STRIDE:]
        total += float(scored.sum())
        count += len(scored)
    return total / count


@torch.no_grad()
def faulty(model: nn.Module, tokens: Tensor) -> float:
    return mean_nats(model, tokens, list(range(0, len(tokens) - 1, STRIDE)))


@torch.no_grad()
def sound(model: nn.Module, tokens: Tensor) -> float:
    targets = len(tokens) - 1
    # one pass over windows that are full, and a last one that scores what is left
    total = 0.0
    scored = 0
    while scored < targets:
        stop = min(scored + (LENGTH if scored == 0 else STRIDE), targets)
        start = max(stop - LENGTH, 0)
        logits = model(tokens[None, start:stop])[0].double()
        nats = nn.functional.cross_entropy(logits, tokens[start + 1 : stop + 1], reduction="none")
        total += float(nats[scored - start :].sum())
        scored = stop
    return total / targets
