"""The Decision Transformer of `transformers`, with random weights, is our recipe, in both directions."""

from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import export_model, import_model
from manyformer.conversion.hugging_face.families import PARAMETERS
from manyformer.nn.core import PADDING_SEGMENT

pytestmark = pytest.mark.oracle
ROWS, LENGTH, OBSERVED, ACTIONS = 2, 7, 3, 2


def released(**settings: Any) -> Any:
    """A model of `transformers` whose weights, biases and norms are all random."""
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    sizes = {"state_dim": OBSERVED, "act_dim": ACTIONS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "max_ep_len": 30}
    torch.manual_seed(0)
    settings = {"bos_token_id": None, "eos_token_id": None} | sizes | settings
    model = DecisionTransformerModel(DecisionTransformerConfig(**settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def arguments(actions: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of the released model, whose first two steps of row 0 are padding."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, :2] = 0
    times = torch.arange(LENGTH).expand(ROWS, -1)
    states, returns = torch.randn(ROWS, LENGTH, OBSERVED), torch.randn(ROWS, LENGTH, 1)
    names = {"states": states, "actions": actions, "rewards": returns, "returns_to_go": returns}
    return names | {"timesteps": times, "attention_mask": mask}


@torch.no_grad()
def assert_equal_actions(model: Any, peer: Any, *, discrete: bool) -> None:
    chosen = torch.randint(ACTIONS, (ROWS, LENGTH))
    vectors = torch.nn.functional.one_hot(chosen, ACTIONS).float() if discrete else torch.rand(ROWS, LENGTH, ACTIONS)
    inputs = arguments(vectors)
    segments = inputs["attention_mask"] - 1
    assert int(segments.min()) == PADDING_SEGMENT
    expected = peer(**inputs).action_preds
    actual = model(
        inputs["returns_to_go"][..., 0],
        inputs["states"],
        chosen if discrete else vectors,
        segments,
        timesteps=inputs["timesteps"],
    ).logits
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(actual[0, 2:], expected[0, 2:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("discrete", [False, True])
def test_imported_weights_predict_the_same_actions(discrete: bool, tmp_path: Path) -> None:
    peer = released(action_tanh=not discrete)
    peer.save_pretrained(tmp_path / "theirs")
    model, report = import_model(tmp_path / "theirs")
    heads = {f"predict_{name}.{kind}" for name in ("state", "return") for kind in PARAMETERS}
    assert set(report.left_out) == {"config.json: attn_pdrop 0.1", "encoder.wte.weight", *heads}
    assert_equal_actions(model, peer, discrete=discrete)
    export_model(model, tmp_path / "ours")
    again = import_model(tmp_path / "ours").model.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("continuous", [False, True])
def test_exported_weights_predict_the_same_actions(continuous: bool, tmp_path: Path) -> None:
    from transformers import DecisionTransformerModel

    torch.manual_seed(1)
    model: Any = mf.build(
        "decision-transformer",
        observations=OBSERVED,
        actions=ACTIONS,
        continuous=continuous,
        dim=16,
        depth=2,
        heads=2,
        offset=continuous,
        window=5,
        return_scale=7.0,
        observation_mean=(1.0, -2.0, 0.5),
        observation_std=(2.0, 0.5, 3.0),
    ).eval()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.1)
    export_model(model, tmp_path / "ours")
    peer, loading = DecisionTransformerModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert_equal_actions(model, peer.eval(), discrete=not continuous)
    assert mf.load(tmp_path / "ours").spec.keywords["window"] == 5


def test_what_the_other_format_cannot_say_is_refused_in_a_sentence(tmp_path: Path) -> None:
    released(activation_function="gelu").save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"config\.json: activation_function is 'gelu', and no recipe has that"):
        import_model(tmp_path / "theirs")
    for keywords, sentence in (
        ({"body": "alibi", "heads": 2}, "body is alibi, and a DecisionTransformerModel has GPT-2's layers"),
        ({"returns": False}, "has no returns"),
        ({"continuous": True, "action_low": (0.0, 0.0)}, r"action_low is \(0.0, 0.0\), and actions"),
    ):
        model: Any = mf.build("decision-transformer", dim=16, depth=1, **keywords)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=sentence):
            export_model(model, tmp_path / "ours")
