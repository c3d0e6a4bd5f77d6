"""Routers choose and weigh as the classes of `transformers` do, and losses have their published values."""

import math

import pytest
import torch

from manyformer.nn.feed_forward import (
    LoadBalanceLoss,
    RandomSecondRouter,
    RouterZLoss,
    Routing,
    SelectionBias,
    SequenceBalanceLoss,
    SigmoidRouter,
    SoftmaxRouter,
)
from manyformer.nn.feed_forward.expert_groups import NO_EXPERT
from manyformer.nn.runtime.training_hooks import run_post_step_updates

DIM = 12


@pytest.mark.oracle
def test_the_router_of_deepseek() -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=DIM, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=5, routed_scaling_factor=2.5
    )
    reference = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(reference.weight)
    torch.nn.init.normal_(reference.e_score_correction_bias, std=0.2)
    bias = SelectionBias(16)
    bias.bias.copy_(reference.e_score_correction_bias)
    ours = SigmoidRouter(DIM, 16, 5, groups=4, groups_per_token=2, scale=2.5, selection_bias=bias)
    ours.proj.weight.data.copy_(reference.weight)
    x = torch.randn(200, DIM)
    _, weights, chosen = reference(x)
    routing = ours(x)
    order, their_order = routing.experts.argsort(), chosen.argsort()
    assert torch.equal(routing.experts.gather(1, order), chosen.gather(1, their_order))
    torch.testing.assert_close(routing.weights.gather(1, order), weights.gather(1, their_order), rtol=0, atol=1e-6)
    torch.testing.assert_close(routing.weights.sum(1), torch.full((200,), 2.5))
    # without the bias other experts are chosen, and those chosen by both weigh as much as before
    bias.bias.zero_()
    assert not torch.equal(ours(x).experts.sort().values, routing.experts.sort().values)


@pytest.mark.oracle
def test_the_router_of_gpt_oss_is_a_softmax_of_the_chosen() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    reference = GptOssTopKRouter(GptOssConfig(hidden_size=DIM, num_local_experts=8, num_experts_per_tok=3))
    torch.nn.init.normal_(reference.weight)
    torch.nn.init.normal_(reference.bias)
    ours = SoftmaxRouter(DIM, 8, 3, bias=True)
    ours.proj.weight.data.copy_(reference.weight)
    ours.proj.bias.data.copy_(reference.bias)
    x = torch.randn(100, DIM)
    _, weights, chosen = reference(x)
    routing = ours(x)
    assert torch.equal(routing.experts, chosen)
    torch.testing.assert_close(routing.weights, weights, rtol=0, atol=1e-6)


def balanced_routing(num_experts: int, per_token: int) -> Routing:
    tokens = torch.arange(4 * num_experts)[:, None]
    experts = (tokens + torch.arange(per_token)) % num_experts
    logits = torch.zeros(len(tokens), num_experts)
    return Routing(experts, torch.ones_like(experts, dtype=torch.float), logits.softmax(-1), logits)


def test_values_of_the_losses_where_the_load_is_balanced() -> None:
    routing, documents = balanced_routing(8, 2), torch.arange(4).repeat_interleave(8)
    torch.testing.assert_close(LoadBalanceLoss(1.0)(routing, documents), torch.tensor(1.0))
    torch.testing.assert_close(LoadBalanceLoss(1.0, scale="tokens")(routing, documents), torch.tensor(2.0))
    torch.testing.assert_close(SequenceBalanceLoss(1.0)(routing, documents), torch.tensor(1.0))
    torch.testing.assert_close(RouterZLoss(1.0)(routing, documents), torch.tensor(math.log(8) ** 2))


@pytest.mark.oracle
def test_the_loss_of_mixtral_and_its_gradient() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(50, 6, requires_grad=True)
    probabilities = logits.softmax(-1)
    experts = probabilities.topk(2).indices
    routing = Routing(experts, probabilities.gather(1, experts), probabilities, logits)
    ours = LoadBalanceLoss(0.5, scale="tokens")(routing, torch.zeros(50, dtype=torch.long))
    reference = 0.5 * load_balancing_loss_func((logits,), 6, 2)
    torch.testing.assert_close(ours, reference)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, reference)))


def test_the_loss_for_each_sequence() -> None:
    logits = torch.randn(30, 6)
    scores = logits.sigmoid()
    experts = scores.topk(3).indices
    routing = Routing(experts, scores.gather(1, experts), scores / scores.sum(-1, keepdim=True), logits)
    documents = torch.tensor([0] * 11 + [1] * 1 + [2] * 18)
    expected = []
    for number in range(3):
        rows = documents == number
        length = int(rows.sum())
        shares = torch.tensor([6 / (3 * length) * int((experts[rows] == expert).sum()) for expert in range(6)])
        expected.append((shares * routing.probabilities[rows].mean(0)).sum())
    torch.testing.assert_close(SequenceBalanceLoss(1.0)(routing, documents), torch.stack(expected).mean())


def test_a_biased_choice_balances_a_skewed_load() -> None:
    """16 experts, 2 for each token, 2,048 tokens a step: the bias reaches what no loss was needed for."""
    torch.manual_seed(0)

    def excess(rate: float) -> float:
        generator = torch.Generator().manual_seed(0)
        router = SigmoidRouter(8, 16, 2, selection_bias=SelectionBias(16, rate)).train()
        router.proj.weight.data = torch.randn(16, 8, generator=generator) * 0.3
        # a constant channel of the input prefers the same experts for all tokens
        router.proj.weight.data[:, 0] = torch.linspace(-0.4, 0.4, 16)
        for step in range(1, 1001):
            x = torch.randn(2048, 8, generator=generator)
            x[:, 0] = 1
            with torch.no_grad():
                load = router(x).load().float()
            run_post_step_updates(router, step)
        return float(load.max() / load.mean()) - 1

    assert excess(0.0) > 0.8
    assert excess(0.001) <= 0.2


def test_the_bias_changes_after_steps_of_training_alone_and_is_saved() -> None:
    bias = SelectionBias(4, rate=0.5)
    router = SigmoidRouter(DIM, 4, 2, selection_bias=bias)
    x = torch.randn(64, DIM)
    router.eval()
    router(x)
    run_post_step_updates(router, 1)
    assert not bias.bias.any()
    router.train()
    # two parts of one step count together
    load = router(x[:40]).load() + router(x[40:]).load()
    run_post_step_updates(router, 2)
    assert torch.equal(bias.bias, 0.5 * (load.float().mean() - load).sign())
    run_post_step_updates(router, 3)
    assert torch.equal(bias.bias, 0.5 * (load.float().mean() - load).sign())
    assert "selection_bias.bias" in router.state_dict()
    assert not any(parameter is bias.bias for parameter in router.parameters())


def test_the_second_expert_is_skipped_by_its_weight_in_training_alone() -> None:
    router = RandomSecondRouter(SoftmaxRouter(DIM, 6, 3), threshold=0.4)
    x = torch.randn(3000, DIM)
    routing = router.train()(x)
    skipped = routing.experts == NO_EXPERT
    assert not skipped[:, 0].any()
    expected = (1 - routing.weights[:, 1:].detach() / 0.4).clamp(min=0).mean()
    assert abs(float(skipped[:, 1:].float().mean() - expected)) < 0.03
    assert not (router.eval()(x).experts == NO_EXPERT).any()


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        (lambda: SoftmaxRouter(DIM, 4, 5), "from 1 to the number of experts"),
        (lambda: SoftmaxRouter(DIM, 4, 1), "would not learn"),
        (lambda: SigmoidRouter(DIM, 8, 2, groups=3), "are not 3 groups"),
        (lambda: SigmoidRouter(DIM, 8, 5, groups=4, groups_per_token=2), "must fit into"),
        (lambda: SelectionBias(4, -1.0), "at least 0"),
        (lambda: RandomSecondRouter(SoftmaxRouter(DIM, 4, 2), 0.0), "above 0"),
    ],
)
def test_impossible_routers_are_refused(router: object, expected: str) -> None:
    assert callable(router)
    with pytest.raises(ValueError, match=expected):
        router()
