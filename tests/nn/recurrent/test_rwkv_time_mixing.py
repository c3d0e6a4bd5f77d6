"""A whole RWKV-7 model against the paper's formulas, token by token, for each document alone."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import manyformer as mf
from manyformer.nn.linear.memory_rules import RecurrentMemory, TokenFeatures
from manyformer.nn.linear.recurrent_rules import GeneralizedDeltaRule

DIM, HEAD, DEPTH, LENGTH = 12, 4, 3, 19


def written_out(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """The logits of one document; the memory of a head is V x K and is read from its right, as in the paper."""
    w = weights
    heads, outputs = DIM // HEAD, []
    memory = [torch.zeros(heads, HEAD, HEAD, dtype=torch.float64) for _ in range(DEPTH)]
    last, last_ff = ([torch.zeros(DIM, dtype=torch.float64) for _ in range(DEPTH)] for _ in range(2))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (DIM,), w[f"{name}.weight"], w[f"{name}.bias"])

    for token in tokens:
        x = norm(w["embed.token.weight"][token], "embed.norm")
        first: Any = None
        for n in range(DEPTH):
            layer, mixing = f"body.layers.{n}", f"body.layers.{n}.time_mixing"
            h = norm(x, f"{layer}.norm")
            xr, xw, xk, xv, xa, xg = (h + mix * (last[n] - h) for mix in w[f"{mixing}.shift.mix"])
            last[n] = h

            def lora(x: Tensor, name: str, f: Any = lambda x: x, prefix: str = mixing) -> Tensor:
                return w[f"{prefix}.{name}.expand.weight"] @ f(w[f"{prefix}.{name}.reduce.weight"] @ x)

            r, k, v = (w[f"{mixing}.{p}_proj.weight"] @ y for p, y in zip("rkv", (xr, xk, xv), strict=True))
            decay = torch.exp(
                -math.exp(-0.5) * torch.sigmoid(w[f"{mixing}.decay.bias"] + lora(xw, "decay", torch.tanh))
            )
            a = torch.sigmoid(w[f"{mixing}.rate.bias"] + lora(xa, "rate"))
            g = lora(xg, "gate", torch.sigmoid)
            if first is None:
                first = v
            else:
                v = v + (first - v) * torch.sigmoid(w[f"{mixing}.value_mix.bias"] + lora(xv, "value_mix"))
            removal = (k * w[f"{mixing}.removal_scale"]).view(heads, HEAD)
            removal = removal / removal.norm(dim=-1, keepdim=True)
            k = k * (1 + (a - 1) * w[f"{mixing}.rate_share"])
            rh, kh, vh, ah, dh = (y.view(heads, HEAD) for y in (r, k, v, a, decay))
            # S (diag(w) - c^T (a * c)) + v^T k
            transition = torch.diag_embed(dh) - removal[:, :, None] * (ah * removal)[:, None, :]
            memory[n] = memory[n] @ transition + vh[:, :, None] * kh[:, None, :]
            y = (memory[n] @ rh[:, :, None])[..., 0]
            y = F.group_norm(
                y.reshape(1, DIM), heads, w[f"{mixing}.norm.weight"], w[f"{mixing}.norm.bias"], 64e-5
            ).view(heads, HEAD)
            y = y + (rh * kh * w[f"{mixing}.bonus"].view(heads, HEAD)).sum(-1, keepdim=True) * vh
            x = x + w[f"{mixing}.out_proj.weight"] @ (y.reshape(-1) * g)
            h = norm(x, f"{layer}.ff.pre_norm")
            shifted = h + w[f"{layer}.ff.inner.shift.mix"][0] * (last_ff[n] - h)
            last_ff[n] = h
            x = x + w[f"{layer}.ff.inner.down.weight"] @ F.relu(w[f"{layer}.ff.inner.up.weight"] @ shifted) ** 2
        outputs.append(w["head.weight"] @ norm(x, "body.norm.inner"))
    return torch.stack(outputs)


def test_the_whole_model_is_its_formula_packed_and_in_steps() -> None:
    """With gradients; the first values, the shifts and the memories begin anew in each document."""
    model: Any = mf.build("rwkv-7", vocab=11, dim=DIM, depth=DEPTH, head_dim=HEAD).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    tokens = torch.randint(0, 11, (2, LENGTH))
    segments = torch.tensor([[0] * LENGTH, [-1, 0, 0, 0, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1, -1, 2, 3, 3, 3]])
    weights = dict(model.named_parameters())
    logits = model(tokens, segments).logits
    expected = torch.zeros_like(logits)
    for row in range(2):
        for number in range(int(segments[row].max()) + 1):
            columns = (segments[row] == number).nonzero().flatten()
            expected[row, columns] = written_out(weights, tokens[row, columns].tolist())
    real = (segments >= 0)[..., None]
    torch.testing.assert_close(logits * real, expected, atol=1e-9, rtol=1e-9)
    grad_output = torch.randn_like(logits) * real
    ours, formula = (torch.autograd.grad((y * grad_output).sum(), list(weights.values())) for y in (logits, expected))
    for name, left, right in zip(weights, ours, formula, strict=True):
        torch.testing.assert_close(left, right, atol=1e-8, rtol=1e-7, msg=name)
    state, pieces = model.init_state(2), []
    with torch.no_grad():
        for piece, part in zip(tokens.split([7, 1, 11], 1), segments.split([7, 1, 11], 1), strict=True):
            output, state, _ = model(piece, part, state=state)
            pieces.append(output)
    torch.testing.assert_close(torch.cat(pieces, 1) * real, expected, atol=1e-9, rtol=1e-9)


def test_float32_over_8192_tokens_of_the_strongest_decay() -> None:
    """Chunks in float32 against the loop in float64; a decay is at least exp(-exp(-1/2))."""
    torch.manual_seed(0)
    width, shape = 8, (1, 1, 8192)
    q, k, v = (torch.randn(*shape, width, dtype=torch.float64) for _ in range(3))
    decay = -math.exp(-0.5) * (1 - 0.1 * torch.rand_like(k))
    gate = torch.cat([decay, F.normalize(k, dim=-1), torch.rand_like(k)], -1)
    rule = GeneralizedDeltaRule(width)
    tokens = TokenFeatures(q, k, v, None, gate, None, None)
    narrow = TokenFeatures(*(x.float() if isinstance(x, torch.Tensor) else x for x in tokens))
    expected = rule(tokens, RecurrentMemory(), form="recurrent", chunk=64, floor=0.0).y
    y = rule(narrow, RecurrentMemory(), form="chunked", chunk=64, floor=0.0).y
    assert float((y - expected).abs().max() / expected.abs().max()) < 1e-5
