"""What `manyformer.nn.decoding.bound_step` saves of a token on a CPU, and what a new mixer loses for which it has no
step.

    python benchmarks/decoding_speed.py --threads 1                                 # about 2 minutes
    python benchmarks/decoding_speed.py --threads 1 --only mixer --processor-time   # where others use the machine

Candidates write the same 64 tokens after a prompt of 16, in turns; what counts is the median over rounds of the ratio
within a round. Models have d 256, 4 layers and 4 heads.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frame
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.nn.core import Context, State
from manyformer.nn.decoding import bound_step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "inference" / "generate"))
from plain_mixer import FadingState, FadingSum, mixer_model

SIZE: dict[str, Any] = {"vocab": 1000, "dim": 256, "depth": 4, "heads": 4}
RECIPES: dict[str, dict[str, Any]] = {
    "transformer-lm": {},
    "llama": {},
    "alibi": {},
    "longformer-lm": {"window": 16, "top_window": 16},
    "linear-transformer": {},
    "gated-deltanet": {},
    "transformer": {},
}
PROMPT, NEW = 16, 64
MIXER_GOAL = 1 / 0.9


def layers(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Each family by its bound step and by `forward`."""
    for name, keywords in RECIPES.items():
        model: Any = mf.build(name, **SIZE, **keywords).eval()
        steps = {"bound": writer(model, model.next_token()), "forward": writer(model, model.forward_token)}
        yield from frame.contest(f"a token of {name}", steps, rounds, {})


def mixer(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """A mixer that decodes by `forward`, among bound layers, against one with a step of its own."""
    model = mixer_model(SIZE["dim"], SIZE["depth"], SIZE["vocab"]).eval()
    by_forward = writer(model, model.next_token())
    bound_step.LAYER_BINDERS[FadingSum] = bind_fading_sum
    steps = {"forward": by_forward, "a step of its own": writer(model, model.next_token())}
    yield from frame.contest("a token of a new mixer", steps, rounds, {"a step of its own": MIXER_GOAL})


def bind_fading_sum(layer: FadingSum) -> bound_step.DecodeStep:
    """The second form that its author need not write: one token of rows that are one document each."""
    value, out, share = bound_step.bind_module(layer.value), bound_step.bind_module(layer.out), layer.fade.sigmoid()

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        total = torch.addcmul(value(x[:, 0]), state.total, share)
        return out(total.tanh())[:, None], FadingState(total, state.document)

    return step


def writer(model: nn.Module, next_token: Any) -> frame.Step:
    """What writes the tokens."""
    decoder: Any = model
    tokens = torch.randint(0, SIZE["vocab"], (1, PROMPT + NEW), generator=torch.Generator().manual_seed(0))
    prompt, new = tokens[:, :PROMPT], tokens[:, PROMPT:].split(1, 1)

    @torch.inference_mode()
    def write() -> Tensor:
        memory = decoder.encode(prompt) if hasattr(decoder, "encode") else None
        logits, state = decoder.forward_token(prompt, decoder.init_state(1, capacity=PROMPT + NEW), memory)
        for token in new:
            logits, state = next_token(token, state, memory)
        return logits

    return write


if __name__ == "__main__":
    frame.run(__doc__, {"layers": layers, "mixer": mixer}, rounds=9, out="decoding-speed.json")
