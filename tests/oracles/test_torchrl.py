"""The objective of a policy against torchrl's."""

import pytest
import torch

from manyformer.models.policy_model import StepLosses, normalize_advantages, policy_loss
from manyformer.nn.batches.episode_batches import ClippedObjective

pytestmark = [
    pytest.mark.oracle,
    # its import takes as long as many other tests together
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("normalize", [False, True])
def test_the_clipped_objective_is_torchrls(normalize: bool) -> None:
    objectives = pytest.importorskip("torchrl.objectives")
    tensordict, modules = pytest.importorskip("tensordict"), pytest.importorskip("tensordict.nn")
    torch.manual_seed(0)
    rows, length, actions, objective = 3, 5, 4, ClippedObjective(clip=0.2, value_weight=0.5, entropy_weight=0.03)
    logits = torch.randn(rows, length, actions, requires_grad=True)
    values = torch.randn(rows, length, 1, requires_grad=True)
    chosen = torch.randint(actions, (rows, length))
    acting_log_probs, advantages, returns = torch.randn(3, rows, length)
    acting_log_probs = acting_log_probs * 0.3 - 1.4

    actor = modules.ProbabilisticTensorDictSequential(
        modules.TensorDictModule(lambda observation: logits, in_keys=["observation"], out_keys=["logits"]),
        modules.ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical
        ),
    )
    critic = modules.TensorDictModule(lambda observation: values, in_keys=["observation"], out_keys=["state_value"])
    loss = objectives.ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=objective.clip,
        critic_coeff=objective.value_weight,
        entropy_coeff=objective.entropy_weight,
        loss_critic_type="l2",
        normalize_advantage=False,
    )
    valid = torch.ones(rows, length, dtype=torch.bool)
    used_advantages = normalize_advantages(advantages, valid) if normalize else advantages
    if normalize:
        expected_advantages = (advantages - advantages.mean()) / advantages.std(unbiased=False)
        torch.testing.assert_close(used_advantages, expected_advantages)
    batch = tensordict.TensorDict(
        {
            "observation": torch.zeros(rows, length, 1),
            "action": chosen,
            "action_log_prob": acting_log_probs,
            "advantage": used_advantages[..., None],
            "value_target": returns[..., None],
        },
        [rows, length],
    )
    result = loss(batch)
    expected = result["loss_objective"] + result["loss_critic"] + result["loss_entropy"]
    distribution = torch.distributions.Categorical(logits=logits)
    policy = policy_loss(distribution.log_prob(chosen), acting_log_probs, used_advantages, objective.clip)
    losses = StepLosses(policy, (values[..., 0] - returns).square(), distribution.entropy())
    actual = losses.total(objective).mean()
    torch.testing.assert_close(actual, expected)
    for leaf in (logits, values):
        torch.testing.assert_close(
            *(torch.autograd.grad(out, leaf, retain_graph=True)[0] for out in (actual, expected))
        )
