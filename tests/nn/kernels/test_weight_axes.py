"""What the rows and columns are of the weights that models report."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.analysis.own_models import build_tiny
from manyformer.nn.core import WeightAxes
from manyformer.nn.kernels.kernel import ReportedWeights, WeightReports
from manyformer.recipes.parts.registry import task_of

OWN, SOURCE, LATENTS = WeightAxes(), WeightAxes(keys="source"), WeightAxes("latents", "latents")
SUMMARIES = WeightAxes("summaries", "summaries")

AXES: dict[str, dict[str, WeightAxes]] = {
    "transformer": {"encoder.0.attention": OWN, "decoder.0.attention": OWN, "decoder.0.cross": SOURCE},
    "bahdanau": {"decoder": SOURCE},
    "perceiver-classifier": {
        "body.inner.reading": WeightAxes("latents", "stream"),
        "body.inner.layers": LATENTS,
    },
    "perceiver": {"body.decoder.attention": WeightAxes("stream", "latents")},
    "etc": {"body.inner.0.attention": SUMMARIES},
    "graphormer-classifier": {"body.0.attention": SUMMARIES},
    "linformer": {"body.0.attention": WeightAxes("stream", "slots")},
    "sinkhorn-transformer": {"body.0.attention": WeightAxes("blocks", "blocks")},
}


def reported(name: str) -> list[ReportedWeights]:
    model: Any = build_tiny(name, {}, 0).eval()
    task = task_of(model)
    tokens = torch.zeros(2, task.fixed_length(model) or 9, dtype=torch.long)
    reports, found = WeightReports(model), list[ReportedWeights]()

    def watch(module: nn.Module, value_name: str, value: Tensor) -> None:
        weights = reports.read(module, value_name, value)
        if weights is not None:
            found.append(weights)

    with torch.no_grad():
        task.call(model, task.example(model, tokens), watch=watch)
    return found


@pytest.mark.parametrize("name", AXES)
def test_each_part_names_its_rows_and_columns(name: str) -> None:
    found = reported(name)
    for prefix, axes in AXES[name].items():
        of_part = [weights for weights in found if weights.part.startswith(prefix)]
        assert of_part, f"{prefix} is none of {[weights.part for weights in found]}"
        assert {weights.axes for weights in of_part} == {axes}


def test_only_linear_attention_implies_its_weights() -> None:
    assert all(weights.implied for weights in reported("linear-transformer"))
    assert not any(weights.implied for weights in reported("transformer-lm"))


def test_only_keys_of_the_own_stream_can_be_remembered() -> None:
    weights = torch.zeros(1, 2, 3, 8)
    assert ReportedWeights("a", OWN, weights).remembered == 5
    assert ReportedWeights("a", SOURCE, weights).remembered == 0
