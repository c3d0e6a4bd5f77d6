"""How a step is computed: recomputed and compiled layers, TF32, and operations that repeat their results."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import make
from torch import nn

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.nn.runtime.devices import MissingOperator, report_missing_operator
from manyformer.training.build_model import choose_float32_products
from manyformer.training.events import TrainingEvent, TrainingStarted
from manyformer.training.layers import (
    LayerChoice,
    checkpoint_activations,
    chosen_layers,
    default_compilation,
    stack_layers,
)


def five_layers() -> Any:
    torch.manual_seed(3)
    return mf.build("transformer-lm", vocab=11, dim=8, depth=5, heads=1, dropout=0.2)


@pytest.mark.parametrize(
    ("choice", "numbers"), [(True, [1, 2, 3, 4, 5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), ([5, 1], [1, 5])]
)
def test_the_chosen_layers_alone_are_computed_again(choice: LayerChoice, numbers: list[int]) -> None:
    model, plain = five_layers(), five_layers()
    checkpoint_activations(model, choice)
    counts = [0] * 5
    for number, layer in enumerate(stack_layers(model)):

        def count(*_: object, number: int = number) -> None:
            counts[number] += 1

        next(layer.children()).register_forward_hook(count)
    for each in (model, plain):
        torch.manual_seed(5)
        each.loss(make("language-model", 1)).total.backward()
    assert [number for number, count in enumerate(counts, start=1) if count == 2] == numbers
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), plain.parameters()))


def test_layers_that_are_not_there_are_refused() -> None:
    for choice in (6, [2, 6]):
        with pytest.raises(UserError, match="but the model has 5 layers, counted from 1"):
            chosen_layers(five_layers(), choice)


def test_layers_are_compiled_one_by_one_by_default_only_where_they_are_called_so() -> None:
    sizes = {"vocab": 8, "dim": 16, "depth": 2, "heads": 2}
    assert default_compilation(mf.build("transformer-lm", **sizes)) == "layers"
    # its stack computes the layers again all together
    assert default_compilation(mf.build("reformer", **sizes, chunk_length=4)) == "on"
    assert default_compilation(nn.Sequential(nn.Linear(4, 4))) == "on"


COMPILED_LAYERS = """
import functools, torch
import manyformer as mf
from torch._dynamo.utils import counters
torch.compile = functools.partial(torch.compile, backend="eager")
data = [torch.arange(16).view(2, 8) % 11 for _ in range(2)]
settings = {"limits.steps": 3, "schedule.warmup": 1, "device": "cpu", "seed": 1, "log.every": 1}
model = {"model.dim": 16, "model.depth": 4, "model.heads": 2, "model.vocab": 11}
for choice in ("layers", "off"):
    torch.compiler.reset()
    counters.clear()
    losses = []
    out = {"compile": choice, "out": FOLDER + choice}
    mf.train("transformer-lm", {**settings, **model, **out}, data=data, eval_data=data,
             on_event=lambda event: losses.append(getattr(event, "loss", None)))
    print(counters["stats"]["unique_graphs"], [loss for loss in losses if loss])
"""


@pytest.mark.slow
def test_compiled_layers_share_one_compilation_and_change_no_loss(tmp_path: Path) -> None:
    """In a process of its own: functions whose shapes are checked, as in these tests, share no compilation."""
    program = COMPILED_LAYERS.replace("FOLDER", repr(f"{tmp_path}/"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (graphs, losses), (no_graphs, expected) = (line.split(" ", 1) for line in done.stdout.splitlines())
    # one to train and one to score, not one for each of four layers
    assert (graphs, no_graphs) == ("2", "0")
    assert json.loads(losses) == pytest.approx(json.loads(expected), rel=1e-5)


def test_tf32_is_chosen_and_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for tf32, device, is_half in (("auto", gpu, True), ("on", gpu, False), ("off", gpu, True), ("off", cpu, False)):
        choose_float32_products(tf32, device, is_half=is_half)
    assert chosen == ["high", "high", "highest", "highest"]
    choose_float32_products("auto", gpu, is_half=False)
    choose_float32_products("auto", cpu, is_half=True)
    assert len(chosen) == 4
    with pytest.raises(UserError, match=r"tf32 is on, but .*\(cpu\) has no TF32; leave it out"):
        choose_float32_products("on", cpu, is_half=False)


def test_a_deterministic_run_asks_torch_for_it_and_gives_it_back(tmp_path: Path) -> None:
    during: list[bool] = []
    lines: dict[str, str] = {}

    def listen(event: TrainingEvent) -> None:
        during.append(torch.are_deterministic_algorithms_enabled())
        if isinstance(event, TrainingStarted):
            lines.update(event.summary_lines)

    settings = {"deterministic": True, "limits.steps": 1, "device": "cpu", "out": str(tmp_path / "run")}
    mf.train(
        nn.Linear(4, 2), settings, data=[(torch.ones(2, 4), torch.zeros(2, 2))], loss=nn.MSELoss(), on_event=listen
    )
    assert during
    assert all(during)
    assert lines["device"].endswith("deterministic")
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_that_cannot_repeat_its_results_is_named() -> None:
    said = "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_deterministic..."
    with pytest.raises(MissingOperator) as failure, report_missing_operator("performer"):
        raise RuntimeError(said)
    assert str(failure.value) == (
        "cumsum_cuda_kernel has no deterministic implementation, and performer needs it on this device; "
        "set deterministic=false"
    )
