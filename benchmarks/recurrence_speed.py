"""Recurrent layers against our linear attention and the torch forms of transformers: training steps, decoding.

    python benchmarks/recurrence_speed.py                 # everything
    python benchmarks/recurrence_speed.py --only step --rounds 3

Width 256, 4 heads, 4 layers, one row of 2,048 tokens; what counts is the median over rounds of the ratio within a
round. The layers of transformers are compared alone, forward and backward. Decoding is that of 32 tokens after 64, by
steps bound to the weights once, against the same by `forward`, and against linear attention's bound steps.
"""

from collections.abc import Callable, Iterator
from typing import Any

import frame
import torch
from steps import language_step
from torch import Tensor, nn

import manyformer as mf
from manyformer.inference.generate.next_token import bind_next_token
from manyformer.nn.core import Context, contiguous_positions

SIZE: dict[str, Any] = {"vocab": 256, "dim": 256, "depth": 4, "heads": 4}
LENGTH = 2048
RECIPES = (
    "deltanet",
    "gated-deltanet",
    "deltaproduct",
    "comba",
    "kda",
    "gdn-2",
    "gla",
    "retnet",
    "lightning",
    "hgrn2",
    "mamba-2",
    "mamba-3",
    "mlstm",
    "rwkv-7",
)
STEP_GOAL, PEER_GOAL = 1.5, 0.5


def training(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """A training step of each recipe against that of linear attention."""
    tokens = torch.randint(0, SIZE["vocab"], (1, LENGTH))
    linear = language_step(mf.build("linear-transformer", **SIZE), tokens)
    for recipe in RECIPES:
        steps = {recipe: language_step(sized_model(recipe), tokens), "linear-transformer": linear}
        yield from frame.contest(f"{recipe}, {LENGTH} tokens", steps, rounds, {"linear-transformer": STEP_GOAL})


def peers(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """A layer of ours against that of transformers, forward and backward."""
    x = torch.randn(1, LENGTH, SIZE["dim"], requires_grad=True)
    positions = contiguous_positions(1, 0, LENGTH, x.device)
    for recipe, make in {"gated-deltanet": olmo_hybrid, "kda": kimi_linear, "mamba-2": mamba_2}.items():
        layer = mf.build(recipe, **SIZE).get_submodule("body.0.attention.inner")
        steps = {
            "ours": backward(layer, lambda y, layer=layer: layer(y, Context(positions)).y, x),
            "transformers": backward(make(), None, x),
        }
        yield from frame.contest(f"a layer of {recipe}, {LENGTH} tokens", steps, rounds, {"transformers": PEER_GOAL})


def decoding(rounds: int) -> Iterator[frame.BenchmarkRow]:
    """Tokens one by one after a prompt of 64: by bound steps, by `forward`, and linear attention's by bound steps."""
    linear = token_steps(mf.build("linear-transformer", **SIZE), bind_next_token)
    for recipe in RECIPES:
        model = sized_model(recipe)
        by_forward = token_steps(model, forward_step)
        steps = {recipe: token_steps(model, bind_next_token), "by forward": by_forward, "linear-transformer": linear}
        yield from frame.contest(f"{recipe}, 32 tokens one by one", steps, rounds, {})


def sized_model(recipe: str) -> Any:
    """The recipe at those of the common sizes that it has: heads follow from the width of a head in `rwkv-7`."""
    parameters = mf.recipes()[recipe].signature.parameters
    return mf.build(recipe, **{name: size for name, size in SIZE.items() if name in parameters})


def token_steps(model: Any, bind: Callable[[Any], Callable[..., Any]]) -> Callable[[], object]:
    """A job that decodes 32 tokens after a prompt of 64 by the step that `bind` makes of the model."""
    next_token, token = bind(model.eval()), torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        start = model(torch.zeros(1, 64, dtype=torch.long), state=model.init_state(1)).state

    @torch.inference_mode()
    def job() -> None:
        state = start
        for _ in range(32):
            _, state = next_token(token, state, None)

    return job


def forward_step(model: Any) -> Callable[..., Any]:
    """One token by `forward`, with the arguments of a bound step."""

    def step(token: Tensor, state: Any, memory: None) -> tuple[Tensor, Any]:
        out = model(token, state=state)
        return out.logits, out.state

    return step


def backward(module: nn.Module, call: Callable[[Tensor], Tensor] | None, x: Tensor) -> Callable[[], None]:
    """A job that computes the gradients of all weights and of x."""

    def job() -> None:
        y = module(x) if call is None else call(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        module.zero_grad(set_to_none=True)

    return job


def olmo_hybrid() -> nn.Module:
    """`OlmoHybridGatedDeltaNet` with heads of 64."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as peer

    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    types = ["linear_attention", "full_attention"]
    config = peer.OlmoHybridConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, layer_types=types, **sizes, **widths
    )
    return peer.OlmoHybridGatedDeltaNet(config, 0)


def kimi_linear() -> nn.Module:
    """`KimiLinearDeltaAttention` with heads of 64, its decays as ours begin."""
    from transformers.models.kimi_linear import modeling_kimi_linear as peer

    types = ["linear_attention", "full_attention"]
    config = peer.KimiLinearConfig(
        hidden_size=256, num_hidden_layers=2, linear_num_heads=4, linear_head_dim=64, layer_types=types
    )
    layer = peer.KimiLinearDeltaAttention(config, 0)
    nn.init.constant_(layer.forget_gate.A_log, 1.0)
    nn.init.constant_(layer.forget_gate.dt_bias, -4.0)
    return layer


def mamba_2() -> nn.Module:
    """`Mamba2Mixer` with 4 heads of 128 and one group."""
    from transformers.models.mamba2 import modeling_mamba2 as peer

    config = peer.Mamba2Config(
        hidden_size=256, num_hidden_layers=2, num_heads=4, head_dim=128, state_size=128, n_groups=1
    )
    layer = peer.Mamba2Mixer(config, 0)
    for parameter in (layer.A_log, layer.dt_bias, layer.D):
        nn.init.constant_(parameter, 0.0)
    return layer


if __name__ == "__main__":
    frame.run(__doc__, {"step": training, "peers": peers, "decode": decoding}, rounds=5, out="recurrence_speed.json")
