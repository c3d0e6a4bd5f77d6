"""What goes to a memory: every recipe with one tells its regions, and their shares sum to 1."""

from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.analysis.figures.region_masses import region_masses
from manyformer.base.errors import UserError
from manyformer.data import HeldOutBatches
from manyformer.nn.batches import CausalLMBatch

SMALL: dict[str, Any] = {"vocab": 11, "dim": 8, "depth": 2, "heads": 2, "memory_length": 6, "dropout": 0.0}
MORE: dict[str, dict[str, Any]] = {
    "transformer-xl": {},
    "compressive-transformer": {"compressed_length": 4, "rate": 2},
    "memorizing-transformer": {"knn_memory_size": 12, "neighbours": 3, "block": 4, "layer": 2},
}


class Read(list[CausalLMBatch]):
    rows_continue = True


def text(count: int) -> Any:
    tokens = torch.randint(0, 11, (2, 6 * count + 1))
    return Read(CausalLMBatch(tokens[:, n : n + 6], tokens[:, n + 1 : n + 7]) for n in range(0, 6 * count, 6))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recipe", MORE)
def test_every_layer_reports_its_regions(recipe: str) -> None:
    held: HeldOutBatches = text(5)
    actual = region_masses(mf.build(recipe, **SMALL, **MORE[recipe]), held)
    assert len(actual) == 2
    for one in actual:
        assert sum(one.shares.values()) == pytest.approx(1, abs=1e-5)
        assert all(share > 0.05 for share in one.shares.values())
    names = {
        "transformer-xl": ("memory", "segment"),
        "compressive-transformer": ("slots", "memory", "segment"),
        "memorizing-transformer": ("memory", "lately", "segment"),
    }
    assert tuple(actual[1].shares) == names[recipe]
    assert actual[0].part.startswith("body.0.attention.")


@pytest.mark.usefixtures("unchecked")
def test_a_model_without_a_memory_is_refused() -> None:
    with pytest.raises(UserError, match="there is no memory"):
        region_masses(mf.build("transformer-xl", **{**SMALL, "memory_length": None}), text(2))
