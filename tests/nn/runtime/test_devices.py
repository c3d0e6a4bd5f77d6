"""What devices can do is said in one place, and a device that is not there is refused in a sentence."""

import ast
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import RunConfig
from manyformer.inference.generate.next_token import graph_engine
from manyformer.nn.batches import CausalLMBatch, to_device
from manyformer.nn.runtime import devices
from manyformer.nn.runtime.devices import (
    KINDS,
    DeviceKind,
    available_devices,
    best_device,
    device_kind,
    device_memory,
    wide_dtype,
)
from manyformer.training.build_model import choose_autocast, choose_device, prepare_model
from manyformer.training.process_group import SINGLE_PROCESS_GROUP, ProcessGroup
from manyformer.training.process_state import GeneratorStates
from pretended_mps import MPS, OnMps, move_model, pretended_mps
from sources import trees_below

SOURCES = Path(mf.__file__).parent
TWO = ProcessGroup(1, 2, 1)
MAKERS = re.compile(r"nvidia|geforce|tesla|amd\b|apple|intel\b", re.IGNORECASE)
MODULES = ("torch.cuda", "torch.mps", "torch.xpu", "torch.backends.mps")
LAST_NAMES = {module.rpartition(".")[2] for module in MODULES}
ALLOWED = {
    "nn/runtime/devices.py",
    "inference/generate/captured_step.py",
    "inference/generate/kept_steps.py",
    "training/ahead_feed.py",
}
"""The entries of devices, and what wraps the graphs and streams of CUDA."""


def test_no_branch_names_a_gpu() -> None:
    """A third device is an entry of `KINDS`; what compares with the name of one elsewhere would forget it."""
    found = []
    for file, tree in trees_below(SOURCES).items():
        place = file.relative_to(SOURCES).as_posix()
        if place in ALLOWED:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                names = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                if names & {"cuda", "mps", "xpu", "nccl"} or any(MAKERS.search(str(name)) for name in names):
                    found.append(f"{place}:{node.lineno}")
            if isinstance(node, ast.Attribute) and node.attr in LAST_NAMES and ast.unparse(node) in MODULES:
                found.append(f"{place}:{node.lineno}")
    assert found == []


def test_the_setting_and_the_entries_name_the_same_devices() -> None:
    assert set(get_args(RunConfig.model_fields["device"].annotation)) == {"auto", *KINDS}


def test_auto_prefers_cuda_then_mps_then_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_devices() == ("cpu",)
    with pretended_mps():
        assert available_devices() == ("mps", "cpu")
        assert best_device().type == "mps"
        assert choose_device("auto", SINGLE_PROCESS_GROUP) == torch.device("mps")
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        assert available_devices() == ("cuda", "mps", "cpu")
        assert choose_device("auto", TWO) == torch.device("cuda", 1)


def test_processes_that_share_work_do_not_get_a_device_without_collectives() -> None:
    with pretended_mps():
        assert choose_device("auto", TWO) == torch.device("cpu")
        with pytest.raises(
            UserError, match="device is mps, on which processes cannot send each other tensors; set dev"
        ):
            choose_device("mps", TWO)


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(
        UserError, match=f"device is {name}, but torch finds no such device here; set device=cpu or auto"
    ):
        choose_device(name, SINGLE_PROCESS_GROUP)


def test_a_third_device_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    other = DeviceKind("xpu", is_available=lambda: True, has_bfloat16=lambda: True, collectives="xccl")
    monkeypatch.setattr(devices, "KINDS", {"xpu": other, **KINDS})
    assert available_devices()[0] == "xpu"
    assert devices.collective_device("xccl").type == "xpu"


def a_model() -> Any:
    torch.manual_seed(0)
    return mf.build("transformer-lm", vocab=11, dim=16, depth=1, heads=2)


def test_precision_by_default_is_float32_on_mps_and_half_precisions_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pretended_mps():
        model = a_model()
        chosen = {name: choose_autocast(name, MPS, model) for name in ("auto", "float32", "bfloat16", "float16")}
        assert chosen == {"auto": None, "float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
        monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda major, minor: False)
        with pytest.raises(
            UserError, match="precision is bfloat16, which pretended M9 does not have; set precision=floa"
        ):
            choose_autocast("bfloat16", MPS, model)


def test_mps_is_neither_compiled_for_nor_captured_by_default() -> None:
    with pretended_mps():
        model = move_model(a_model())
        model.to = lambda device: model
        assert prepare_model(RunConfig(recipe="transformer-lm"), model, MPS) is None
        assert model._compiled_call_impl is None
        assert graph_engine(model, "auto") is None
        with pytest.raises(UserError, match="CUDA graphs need a CUDA device: this model is on the device mps"):
            graph_engine(model, "graph")


def test_batches_are_copied_without_pinned_memory_on_mps() -> None:
    tokens = torch.arange(6).view(2, 3)
    with pretended_mps():
        moved = to_device(CausalLMBatch(tokens, tokens + 1), MPS)
        assert isinstance(moved.tokens, OnMps)
        assert moved.targets.tolist() == [[1, 2, 3], [4, 5, 6]]
    batch = CausalLMBatch(tokens, tokens)
    assert to_device(batch, torch.device("cpu")) is batch


def test_the_generator_of_mps_is_in_checkpoints() -> None:
    with pretended_mps():
        torch.manual_seed(3)
        states = GeneratorStates.of_process()
        assert set(states.devices) == {"mps"}
        drawn = torch.rand(4, device="mps")
        states.restore()
        assert torch.rand(4, device="mps").tolist() == drawn.tolist()
    # on a machine without the device its state has no use
    states.restore()


def test_a_generator_of_cuda_of_an_older_checkpoint_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_rng_state", restored.append)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    states = GeneratorStates.of_process()
    content = states.model_dump(mode="json")
    content["cuda"] = content.pop("devices")["cuda"]
    GeneratorStates.model_validate_json(json.dumps(content)).restore()
    assert [state.tolist() for state in restored] == [[0] * 16]


def test_memory_and_types_of_mps() -> None:
    with pretended_mps():
        assert device_memory(MPS) == 16 << 30
        assert wide_dtype(MPS) == torch.float32
    assert wide_dtype(torch.device("cpu")) == wide_dtype(torch.device("cuda")) == torch.float64


def test_a_device_without_an_entry_promises_nothing() -> None:
    kind = device_kind(torch.device("meta"))
    assert (kind.is_host, kind.pins_copies, kind.captures_graphs, kind.collectives) == (False, False, False, None)
