"""Language models with every rotary position keep the promises of their card, also beyond the original length."""

import pytest
import torch

import manyformer as mf
from manyformer.position import RotaryPosition

NAMES = ("rope", "rope-linear", "rope-ntk", "rope-dynamic", "rope-yarn")
SCALED = ("rope-dynamic", "rope-yarn")
"""Those whose tables depend on the length in the least simple ways are tried every time."""

CONTRACTS = {
    *("causal", "cached", "prefill", "preallocated", "rewind", "beams", "padding-left", "padding-state"),
    *("packing", "packing-state", "gradients", "float64", "bfloat16", "saving"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SCALED else pytest.mark.slow) for name in NAMES]
)
def test_promises(name: str) -> None:
    report = mf.check("compose", keywords={"position": name, "max_length": 16, "depth": 1}, only=CONTRACTS, length=40)
    assert not [row.sentence for row in report.rows if row.verdict != "passed"]


def test_layers_share_one_table() -> None:
    model = mf.build("compose", vocab=11, dim=16, depth=3, heads=2, position="rope")
    assert len({id(module) for module in model.modules() if isinstance(module, RotaryPosition)}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_up_to_the_original_length_only_what_should_be_is_changed(name: str) -> None:
    """Scalings have no weights: a model trained with plain rotary positions is read by them as it is."""
    small = {"vocab": 11, "dim": 16, "depth": 2, "heads": 2, "max_length": 12}
    plain, scaled = (mf.build("compose", **small, position=one) for one in ("rope", name))
    scaled.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 11, (2, 12))
    same = torch.equal(plain(tokens).logits, scaled(tokens).logits)
    near = torch.allclose(plain(tokens).logits, scaled(tokens).logits, atol=1e-5)
    assert same or near if name in ("rope", "rope-dynamic") else not near
