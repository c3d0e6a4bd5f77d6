"""Mixtures of experts equal the blocks of `transformers`; padding, other rows and the order of tokens do not matter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.nn.core import Context, TokenPositions, contiguous_positions
from manyformer.nn.feed_forward import (
    GatedExperts,
    LoadBalanceLoss,
    MixtureOfExperts,
    RouterZLoss,
    ScalarGate,
    SelectionBias,
    SequenceBalanceLoss,
    SigmoidRouter,
    SoftmaxRouter,
)
from manyformer.nn.feed_forward.feedforward import GatedFeedForward

DIM, WIDTH, EXPERTS = 12, 8, 6


def shaken(module: nn.Module) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def copy_experts(theirs: Any, ours: GatedExperts) -> None:
    gate, up_weight = theirs.gate_up_proj.data.chunk(2, dim=1)
    for part, weight in {"gate": gate, "up": up_weight, "down": theirs.down_proj.data}.items():
        getattr(ours, part).weight.data.copy_(weight)


def copy_gated(theirs: Any, ours: GatedFeedForward) -> None:
    for part in ("gate", "up", "down"):
        getattr(ours, part).weight.data.copy_(getattr(theirs, f"{part}_proj").weight)


def run(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    return layer(x, Context(contiguous_positions(len(x), 0, x.shape[1], x.device))).y


@pytest.mark.oracle
def test_the_block_of_mixtral() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=DIM, intermediate_size=WIDTH, num_local_experts=EXPERTS)
    reference = shaken(MixtralSparseMoeBlock(config))
    ours = MixtureOfExperts(SoftmaxRouter(DIM, EXPERTS, 2), GatedExperts(EXPERTS, DIM, WIDTH))
    ours.router.proj.weight.data.copy_(reference.gate.weight)  # type: ignore[union-attr]
    copy_experts(reference.experts, ours.experts)  # type: ignore[arg-type]
    x = torch.randn(2, 17, DIM)
    torch.testing.assert_close(run(ours, x), reference(x.clone()), rtol=0, atol=1e-5)


@pytest.mark.oracle
def test_the_block_of_deepseek_with_its_shared_expert() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    sizes = {"n_routed_experts": EXPERTS, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
    reference = shaken(DeepseekV3MoE(DeepseekV3Config(hidden_size=DIM, moe_intermediate_size=WIDTH, **sizes)))
    router = SigmoidRouter(
        DIM, EXPERTS, 3, groups=3, groups_per_token=2, scale=2.5, selection_bias=SelectionBias(EXPERTS)
    )
    shared = GatedFeedForward(DIM, WIDTH)
    ours = MixtureOfExperts(router, GatedExperts(EXPERTS, DIM, WIDTH), shared=shared)
    router.proj.weight.data.copy_(reference.gate.weight)
    copy_experts(reference.experts, ours.experts)  # type: ignore[arg-type]
    copy_gated(reference.shared_experts, shared)
    x = torch.randn(2, 17, DIM)
    torch.testing.assert_close(run(ours, x), reference(x), rtol=0, atol=1e-5)


@pytest.mark.oracle
def test_the_block_of_qwen3_next_with_its_gated_shared_expert() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    config = Qwen3NextConfig(
        hidden_size=DIM,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        shared_expert_intermediate_size=10,
        num_hidden_layers=4,
    )
    reference = shaken(Qwen3NextSparseMoeBlock(config))
    feedforward = GatedFeedForward(DIM, 10)
    shared = ScalarGate(feedforward, DIM)
    ours = MixtureOfExperts(SoftmaxRouter(DIM, EXPERTS, 3), GatedExperts(EXPERTS, DIM, WIDTH), shared=shared)
    ours.router.proj.weight.data.copy_(reference.gate.weight)  # type: ignore[union-attr]
    copy_experts(reference.experts, ours.experts)  # type: ignore[arg-type]
    copy_gated(reference.shared_expert, feedforward)
    shared.gate.weight.data.copy_(reference.shared_expert_gate.weight)
    x = torch.randn(2, 17, DIM)
    torch.testing.assert_close(run(ours, x), reference(x), rtol=0, atol=1e-5)


def balanced_layer(**options: Any) -> MixtureOfExperts:
    losses = (LoadBalanceLoss(0.1), RouterZLoss(0.01), SequenceBalanceLoss(0.1))
    router = SoftmaxRouter(DIM, EXPERTS, 2)
    return shaken(MixtureOfExperts(router, GatedExperts(EXPERTS, DIM, WIDTH), losses=losses, **options))  # type: ignore[no-any-return]


def packed_positions(segments: Tensor) -> TokenPositions:
    return TokenPositions(torch.zeros_like(segments), segments)


def test_padding_is_in_no_output_no_load_and_no_loss() -> None:
    layer = balanced_layer().train()
    x = torch.randn(2, 9, DIM)
    segments = torch.tensor([[-1, -1, 0, 0, 0, -1, 0, 1, 1], [0, 0, 0, -1, -1, -1, -1, -1, -1]])
    watched: list[Tensor] = []
    ctx = Context(packed_positions(segments), watch=lambda module, name, value: watched.append(value))
    y, _, loss = layer(x, ctx)
    assert not y[segments < 0].any()
    # the same documents in rows of their own
    documents = [x[0, segments[0] == 0], x[0, segments[0] == 1], x[1, :3]]
    for document, expected in zip(documents, (y[0, segments[0] == 0], y[0, segments[0] == 1], y[1, :3]), strict=True):
        torch.testing.assert_close(run(layer, document[None])[0], expected, rtol=0, atol=1e-6)
    other = x.masked_fill((segments < 0)[..., None], 7.0)
    torch.testing.assert_close(layer(other, ctx).loss, loss)
    load = next(value for value in watched if value.shape == (EXPERTS,))
    torch.testing.assert_close(load.sum(), torch.tensor(1.0))
    assert torch.equal((load * 18).round(), layer.router(torch.cat(documents)).load().float())


def test_permuted_tokens_give_permuted_outputs_and_losses_are_of_training_alone() -> None:
    layer = balanced_layer()
    x, order = torch.randn(1, 15, DIM), torch.randperm(15)
    torch.testing.assert_close(run(layer, x[:, order]), run(layer, x)[:, order], rtol=0, atol=1e-6)
    ctx = Context(contiguous_positions(1, 0, 15, x.device))
    assert layer.eval()(x, ctx).loss == 0.0
    assert layer.train()(x, ctx).loss > 0.0


def test_capacity_depends_on_the_document_alone_and_no_later_token_changes_an_earlier_one() -> None:
    layer = balanced_layer(capacity_factor=0.5)
    x = torch.randn(1, 20, DIM)
    y = run(layer, x)
    assert (y == 0).all(-1).any()
    changed = x.clone()
    changed[:, 12:] = torch.randn(1, 8, DIM)
    torch.testing.assert_close(run(layer, changed)[:, :12], y[:, :12], rtol=0, atol=1e-6)
    # packed behind another document
    packed, segments = torch.cat([torch.randn(1, 6, DIM), x], 1), torch.tensor([[0] * 6 + [1] * 20])
    together = layer(packed, Context(packed_positions(segments))).y
    torch.testing.assert_close(together[:, 6:], y, rtol=0, atol=1e-6)


def test_all_padding_is_finite_with_gradients() -> None:
    layer = balanced_layer().train()
    x = torch.randn(1, 4, DIM, requires_grad=True)
    y, _, loss = layer(x, Context(packed_positions(torch.full((1, 4), -1))))
    (y.sum() + loss).backward()
    assert not y.any()
    assert x.grad is not None
    assert not x.grad.any()


def test_routers_and_experts_of_different_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="router has 6 experts, and there are 5"):
        MixtureOfExperts(SoftmaxRouter(DIM, 6, 2), GatedExperts(5, DIM, WIDTH))
    with pytest.raises(ValueError, match="above 0"):
        balanced_layer(capacity_factor=0.0)
