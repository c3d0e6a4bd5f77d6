"""`manyformer doctor` on the device at hand: what it has, and which recipes need what it lacks."""

import pytest
import torch

from manyformer.cli import doctor
from manyformer.cli.doctor import DoctorFinding, _device, try_recipe, try_recipes
from manyformer.models import Model
from manyformer.nn.runtime.devices import MissingOperator, describe_missing, report_missing_operator
from pretended_mps import pretended_mps

MISSING = (
    "The operator 'aten::_linalg_eigh' is not currently implemented for the MPS device. If you want this op to be "
    "considered for addition please comment on https://github.com/pytorch/pytorch/issues/141287"
)


def test_a_mac_is_described_by_what_it_has_and_lacks() -> None:
    with pretended_mps():
        found = list(_device())
    assert found[0] == DoctorFinding(
        "GPU", "ok", "mps: pretended M9, 16 GiB, has bfloat16, no float64, which is computed on the CPU"
    )
    assert "manyformer doctor --recipes" in found[1].result


def test_a_machine_without_a_gpu_says_so() -> None:
    assert list(_device()) == [DoctorFinding("GPU", "absent", "none that torch can use; all runs on the CPU")]


def test_the_recipes_of_this_machine_are_tried() -> None:
    assert try_recipe("transformer-lm", torch.device("cpu")) is None


def test_a_recipe_that_needs_a_missing_operator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(model: Model) -> None:
        if model.spec.recipe == "mamba":
            raise NotImplementedError(MISSING)
        if model.spec.recipe == "t5":
            raise RuntimeError("a defect")

    monkeypatch.setattr(doctor, "_train_step", lacking)
    *wrong, summary = try_recipes(torch.device("cpu"), ("bert", "mamba", "t5"))
    assert wrong == [
        DoctorFinding("mamba", "absent", "mps has no aten::_linalg_eigh"),
        DoctorFinding("t5", "broken", "RuntimeError: a defect"),
    ]
    assert summary.result.startswith("1 of 3 train and decode on cpu")


def test_what_torch_says_of_a_missing_kernel_becomes_a_sentence() -> None:
    elsewhere = NotImplementedError("Could not run 'aten::mkldnn_linear' with arguments from the 'CUDA' backend. This")
    sentence = describe_missing(elsewhere, "bert")
    assert sentence == (
        "the device cuda has no aten::mkldnn_linear in this version of torch, which bert needs; use the device cpu"
    )
    no_type = TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
    assert describe_missing(no_type, "bert") == (
        "the device mps has no float64 in this version of torch, which bert needs; use the device cpu"
    )
    assert describe_missing(RuntimeError("another"), "bert") is None


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="another"), report_missing_operator("bert"):
        raise RuntimeError("another")
    with pytest.raises(MissingOperator, match="PYTORCH_ENABLE_MPS_FALLBACK=1"), report_missing_operator("bert"):
        raise NotImplementedError(MISSING)
