"""Learning rates against published values; what decays; how the optimiser is kept."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.config import (
    AdadeltaConfig,
    AdagradConfig,
    AdamConfig,
    AdamWConfig,
    LimitsConfig,
    OptimConfig,
    RunConfig,
)
from manyformer.training.engine import set_learning_rate
from manyformer.training.optimizers import (
    clip_each_gradient,
    make_optimizer,
    named_optimizer_state,
    restore_optimizer_state,
)
from manyformer.training.parameter_rules import weight_decay_groups
from manyformer.training.schedules import cosine, draw_rates, linear_warmup, make_schedule, make_warmup, noam
from manyformer.training.train_state import RunAmounts


def test_noam_of_the_paper() -> None:
    # Vaswani et al. 2017, section 5.3, base: width 512, 4000 steps of warm-up
    assert noam(4000, width=512, warmup=4000) == pytest.approx(6.99e-4, rel=1e-3)
    assert noam(1, width=512, warmup=4000) == pytest.approx(1.75e-7, rel=3e-3)
    assert noam(100_000, width=512, warmup=4000) == pytest.approx(1.40e-4, rel=3e-3)
    rates = [noam(step, width=512, warmup=50) for step in range(1, 200)]
    assert max(rates) == rates[49]


def test_cosine_and_warm_up() -> None:
    assert [linear_warmup(step, warmup=4) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert linear_warmup(1, warmup=0) == 1.0
    assert cosine(0.0, final_ratio=0.1) == 1.0
    assert cosine(0.5, final_ratio=0.1) == pytest.approx(0.55)
    assert cosine(1.0, final_ratio=0.1) == cosine(2.0, final_ratio=0.1) == pytest.approx(0.1)


def a_run(**given: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": "transformer-lm", **given})


def test_schedules_of_a_run() -> None:
    rate = make_schedule(a_run(schedule={"name": "noam", "warmup": 40, "scale": 2.0}, limits={"steps": 100}), width=64)
    assert rate(40, 0.4) == pytest.approx(2 * 64**-0.5 * 40**-0.5)
    rate = make_schedule(a_run(optim={"lr": 0.5}, schedule={"name": "constant", "warmup": 10}), width=None)
    assert [rate(step, 0.0) for step in (1, 10, 1000)] == [0.05, 0.5, 0.5]
    steps = {"steps": 110}
    rate = make_schedule(
        a_run(optim={"lr": 0.5}, schedule={"warmup": 10, "final_ratio": 0.2}, limits=steps), width=None
    )
    assert rate(5, 0.0) == 0.25
    assert rate(10, 0.0) == 0.5
    # the share is not looked at where the end is a step: the rate is a function of the step alone
    assert rate(60, 0.9) == pytest.approx(0.3)
    assert rate(110, 0.0) == pytest.approx(0.1)


def test_cosine_over_minutes_follows_the_clock() -> None:
    rate = make_schedule(
        a_run(optim={"lr": 1.0}, schedule={"warmup": 1, "final_ratio": 0.0}, limits={"minutes": 5}), width=None
    )
    assert rate(1000, 0.5) == pytest.approx(0.5)
    assert rate(1000, 1.0) == pytest.approx(0.0)


def test_no_jump_at_the_end_of_the_warm_up() -> None:
    for limits in ({"minutes": 5}, {"steps": 1000}, {"epochs": 2.0}):
        rate = make_schedule(a_run(optim={"lr": 1.0}, schedule={"warmup": 100}, limits=limits), width=None)
        assert rate(101, 0.1) == pytest.approx(rate(100, 0.1), rel=0.03)


TIMED: dict[str, dict[str, Any]] = {
    "cosine": {"optim": {"lr": 1.0}},
    "constant": {"optim": {"lr": 1.0}, "schedule": {"name": "constant"}},
    "noam": {"schedule": {"name": "noam", "width": 4, "warmup": 100, "scale": 20.0}},
}
"""Schedules with a peak of 1 after 100 of 1200 steps."""


@pytest.mark.parametrize("name", TIMED)
def test_the_warm_up_shrinks_with_a_run_that_ends_before_its_last_step(name: str) -> None:
    limits = {"steps": 1200, "minutes": 3.0}
    rate = make_schedule(a_run(**TIMED[name], limits=limits), width=None)
    steps_alone = make_schedule(a_run(**TIMED[name], limits={"steps": 1200}), width=None)
    # steps are nearer: nothing changes
    for step in range(1, 101):
        assert rate(step, (step - 1) / 1200) == pytest.approx(steps_alone(step, 0.0), rel=0.02)
    # at a tenth of the speed the run has 120 steps, of which 10 are warm-up as well
    rates = [rate(step, (step - 1) / 120) for step in range(1, 121)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[4] < 0.6
    assert rates[11] > 0.95
    # a first step that takes half of the time does not end the warm-up
    assert rate(2, 0.5) <= 0.2 + 1e-9


@pytest.mark.parametrize("name", TIMED)
def test_limits_of_steps_alone_do_not_look_at_the_progress(name: str) -> None:
    rate = make_schedule(a_run(**TIMED[name], limits={"steps": 1200}), width=None)
    assert [rate(step, 0.9) for step in (1, 50, 100, 600)] == [rate(step, 0.0) for step in (1, 50, 100, 600)]


def test_the_share_of_the_warm_up_without_steps() -> None:
    default = make_warmup(a_run(limits={"minutes": 3.0}))
    assert default(20, 0.1) == 1.0
    assert default(20, 0.05) == pytest.approx(0.5)
    chosen = make_warmup(a_run(limits={"minutes": 3.0}, schedule={"warmup": 200}))
    assert chosen(20, 0.1) == pytest.approx(0.2)
    assert chosen(100, 0.5) == 1.0


@pytest.mark.parametrize("recipe", ["transformer-lm", "transformer", "bert", "transformer-classifier"])
def test_only_matrices_decay(recipe: str) -> None:
    model = mf.build(recipe, vocab=11, dim=8, depth=1, heads=1)
    names = {id(weight): name for name, weight in model.named_parameters()}
    decays, stays = ({names[id(weight)] for weight in group} for group in weight_decay_groups(model))
    assert decays | stays == set(names.values())
    assert all(
        "embed" in name
        or "bias" in name
        or "norm" in name
        or "before" in name
        or "after" in name
        or "transform.2" in name
        for name in stays
    )
    assert not any("embed" in name or "bias" in name for name in decays)
    assert any(name.endswith("up.weight") for name in decays)


@pytest.mark.parametrize("config", [AdamWConfig(lr=0.1, weight_decay=0.5), AdamConfig(lr=0.1)])
def test_steps_equal_the_formula(config: AdamConfig | AdamWConfig) -> None:
    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2).double()
    weight = layer.weight.detach().clone()
    optimiser = make_optimizer(layer, config)
    mean = square = torch.zeros_like(weight)
    (one, two), rate = config.betas, 0.01
    for step in range(1, 4):
        layer(torch.randn(5, 3).double()).pow(2).sum().backward()
        assert layer.weight.grad is not None
        gradient = layer.weight.grad.clone()
        set_learning_rate(optimiser, rate)
        optimiser.step()
        optimiser.zero_grad()
        mean, square = one * mean + (1 - one) * gradient, two * square + (1 - two) * gradient**2
        decay = 1 - rate * config.weight_decay if isinstance(config, AdamWConfig) else 1.0
        update = (mean / (1 - one**step)) / ((square / (1 - two**step)).sqrt() + config.eps)
        weight = decay * weight - rate * update
        torch.testing.assert_close(layer.weight.detach(), weight)


def test_adagrad_and_adadelta_equal_the_formula() -> None:
    torch.manual_seed(1)
    adagrad, adadelta = AdagradConfig(), AdadeltaConfig()
    layers = [torch.nn.Linear(3, 2).double() for _ in "12"]
    weights = [layer.weight.detach().clone() for layer in layers]
    optimisers = [make_optimizer(layer, config) for layer, config in zip(layers, (adagrad, adadelta))]
    total = square = mean_step = torch.zeros_like(weights[0])
    for _ in range(3):
        gradients = []
        for layer, optimiser in zip(layers, optimisers):
            layer(torch.randn(5, 3).double()).pow(2).sum().backward()
            assert layer.weight.grad is not None
            gradients.append(layer.weight.grad.clone())
            set_learning_rate(optimiser, 0.5)
            optimiser.step()
            optimiser.zero_grad()
        total = total + gradients[0] ** 2
        weights[0] = weights[0] - 0.5 * gradients[0] / (total.sqrt() + adagrad.eps)
        square = adadelta.rho * square + (1 - adadelta.rho) * gradients[1] ** 2
        step = ((mean_step + adadelta.eps) / (square + adadelta.eps)).sqrt() * gradients[1]
        mean_step = adadelta.rho * mean_step + (1 - adadelta.rho) * step**2
        weights[1] = weights[1] - 0.5 * step
        for layer, weight in zip(layers, weights):
            torch.testing.assert_close(layer.weight.detach(), weight)


def test_each_gradient_is_clipped_by_itself() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in "12"]
    weights[0].grad, weights[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.01])
    clip_each_gradient(weights, 0.5)
    torch.testing.assert_close(weights[0].grad, torch.tensor([0.3, 0.4]))
    assert weights[1].grad.tolist() == pytest.approx([0.0, 0.01])


@pytest.mark.parametrize("config", [AdamWConfig(lr=1.0), AdagradConfig(lr=1.0), AdadeltaConfig(lr=1.0)])
def test_the_optimiser_goes_on_where_it_was(config: OptimConfig) -> None:
    def stepped(layer: torch.nn.Linear, optimiser: torch.optim.Optimizer, number: int) -> None:
        layer(torch.full((2, 3), float(number))).pow(2).sum().backward()
        set_learning_rate(optimiser, 0.1)
        optimiser.step()
        optimiser.zero_grad()

    one, two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first, second = make_optimizer(one, config), make_optimizer(two, config)
    for number in range(3):
        stepped(one, first, number)
    two.load_state_dict(one.state_dict())
    restore_optimizer_state(two, second, named_optimizer_state(one, first), Path())
    stepped(one, first, 5)
    stepped(two, second, 5)
    assert torch.equal(one.weight, two.weight)
    with pytest.raises(ValueError, match="fits no weight"):
        restore_optimizer_state(two, second, {"nowhere/exp_avg": torch.zeros(2)}, Path())


def test_a_share_is_never_beyond_one() -> None:
    assert math.isclose(cosine(1.5, final_ratio=0.0), 0.0, abs_tol=1e-12)


def wsd_rates(steps: int, **schedule: Any) -> list[float]:
    run = a_run(optim={"lr": 1.0}, schedule={"name": "wsd", "warmup": 2, **schedule}, limits={"steps": steps})
    rate = make_schedule(run, width=None)
    return [rate(step, 0.0) for step in range(1, steps + 1)]


def test_wsd_warms_up_stays_and_decays_to_a_last_step_above_0() -> None:
    assert wsd_rates(10, decay_share=0.4) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert wsd_rates(10, decay_share=0.4, final_ratio=0.2)[6:] == pytest.approx([1, 0.8, 0.6, 0.4])
    roots = [1, 1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5]
    assert wsd_rates(10, decay_share=0.4, shape="1-sqrt")[6:] == pytest.approx(roots)
    powers = [1, 0.1**0.25, 0.1**0.5, 0.1**0.75]
    assert wsd_rates(10, decay_share=0.4, shape="exponential", final_ratio=0.1)[6:] == pytest.approx(powers)
    # the share of 1 is linear to zero after the warm-up
    assert wsd_rates(10, decay_share=1.0) == pytest.approx([0.5, 1, *(1 - done / 8 for done in range(8))])


@pytest.mark.parametrize("limits", [{"minutes": 5}, {"tokens": 1000}, {"steps": 10**6, "minutes": 5}])
def test_wsd_follows_the_progress_of_a_run_by_time_or_tokens(limits: dict[str, float]) -> None:
    schedule = {"name": "wsd", "warmup": 10, "decay_share": 0.5}
    rate = make_schedule(a_run(optim={"lr": 2.0}, schedule=schedule, limits=limits), width=None)
    assert [rate(100, progress) for progress in (0.5, 0.75, 0.95)] == pytest.approx([2.0, 1.0, 0.2])


def test_a_branch_decays_from_where_it_began() -> None:
    schedule = {"name": "wsd", "warmup": 1, "decay_from": "now"}
    run = a_run(optim={"lr": 1.0}, schedule=schedule, limits={"tokens": 1000}, branch_from="plateau")
    rate = make_schedule(run, width=None, branch=RunAmounts(step=30, tokens=600))
    assert [rate(100, progress) for progress in (0.6, 0.7, 0.9)] == pytest.approx([1.0, 0.75, 0.25])
    through = wsd_rates(100, decay_share=0.3)
    run = run.model_copy(update={"limits": LimitsConfig(steps=100)})
    rate = make_schedule(run, width=None, branch=RunAmounts(step=70))
    assert [rate(step, 0.0) for step in range(71, 101)] == through[70:]


def test_the_drawing_shows_where_the_rate_is_high() -> None:
    run = a_run(optim={"lr": 1.0}, schedule={"name": "wsd", "warmup": 2, "decay_share": 0.5}, limits={"steps": 8})
    schedule = make_schedule(run, width=None)
    assert draw_rates(schedule.sample(8)) == "▄████▆▄▂"
    assert draw_rates([0.0, 1.0, 0.01]) == " █▁"
    assert schedule.describe() == "up to 1 in 2 steps, then constant, after step 4 linear decay to 0 at step 8"
