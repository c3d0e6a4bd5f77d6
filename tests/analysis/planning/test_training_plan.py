"""Plans of whole trainings: arithmetic that can be checked by hand, sizes that are chosen, and what is refused."""

import json
from typing import Any

import pytest

from manyformer.analysis.planning import PlanRequest, keywords_of_size, parse_devices, parse_quantity, plan_training
from manyformer.analysis.planning.accelerators import ACCELERATORS, find_accelerator
from manyformer.analysis.planning.hardware import device_at_hand
from manyformer.base.errors import UserError
from manyformer.cli import import_commands
from manyformer.cli.app import run_command
from manyformer.recipes.parts.model_summary import count_parameters, nearest_size
from manyformer.recipes.parts.registry import build_on_meta

SMALL: dict[str, Any] = {"vocab": 50, "dim": 64, "depth": 2, "heads": 2}


def test_the_arithmetic_of_a_plan() -> None:
    request = PlanRequest(
        devices=parse_devices("4xh100"), tokens=1_000_000, length=64, batch_tokens=1024, utilization=0.5, price=3.0
    )
    plan = plan_training("transformer-lm", SMALL, request)
    assert (plan.rows, plan.steps) == (4, 977)
    parameters = count_parameters(build_on_meta("transformer-lm", {**SMALL, "max_length": 64}))
    assert plan.parameters == parameters
    assert (plan.weights, plan.gradients, plan.moments) == (4 * parameters, 4 * parameters, 8 * parameters)
    assert plan.rate == 0.5 * 989e12
    assert plan.seconds == pytest.approx(plan.total_flops / (4 * plan.rate))
    assert plan.price == pytest.approx(3.0 * 4 * plan.seconds / 3600)
    assert plan.checkpoint_bytes == 12 * parameters
    assert plan.kept_bytes == 3 * plan.checkpoint_bytes
    assert plan.data_bytes == 1_000_000  # fewer than 257 tokens are stored in a byte each
    assert plan.fits


def test_sharding_divides_what_each_parameter_needs() -> None:
    plans = [
        plan_training(
            "transformer-lm",
            SMALL,
            PlanRequest(devices=parse_devices("8xa100"), length=64, batch_tokens=512, strategy=strategy),
        )
        for strategy in ("ddp", "fsdp")
    ]
    assert plans[1].moments == plans[0].moments // 8
    assert plans[0].peak - plans[1].peak == pytest.approx(16 * plans[0].parameters * 7 / 8, rel=0.01)


@pytest.mark.slow
def test_the_largest_batch_fits_and_twice_as_much_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyformer.analysis.planning.hardware.device_memory", lambda device: 50_000_000)
    monkeypatch.setattr("manyformer.analysis.planning.training_plan.matmul_rate", lambda: 1e11)

    def planned(batch: int) -> Any:
        return plan_training(
            "transformer-lm", SMALL, PlanRequest(devices=parse_devices("cpu"), length=64, batch_tokens=batch)
        )

    largest = planned(512).largest_batch
    assert largest > 512
    assert planned(largest).fits
    assert not planned(2 * largest).fits
    assert planned(512).tokens == 20 * planned(512).parameters


@pytest.mark.parametrize(("wanted", "dim"), [(125_000_000, 768), (1_300_000_000, 2048)])
def test_chosen_sizes_are_near_those_of_gpt_3(wanted: int, dim: int) -> None:
    keywords = keywords_of_size("transformer-lm", {"vocab": 50257, "max_length": 2048}, wanted)
    count = count_parameters(build_on_meta("transformer-lm", keywords))
    assert count == pytest.approx(wanted, rel=0.12)
    assert keywords["dim"] == pytest.approx(dim, rel=0.1)
    assert keywords["dim"] == 64 * keywords["heads"]


@pytest.mark.parametrize("target", [0, 1, 2, 9, 130, 2401, 2500, 9999])
@pytest.mark.parametrize("start", [1, 7, 49, 80])
def test_the_nearest_size_is_found_from_every_start(target: int, start: int) -> None:
    expected = min(range(1, 50), key=lambda number: abs(number * number - target))
    assert nearest_size(lambda number: number * number, target, 49, start) == expected


@pytest.mark.parametrize(
    ("text", "number"), [("1.3B", 1_300_000_000), ("26b", 26_000_000_000), ("20k", 20_000), ("1,024", 1024)]
)
def test_quantities(text: str, number: int) -> None:
    assert parse_quantity(text, "--tokens") == number


@pytest.mark.parametrize("text", ["", "0", "-5", "1.3Q", "nan", "inf", "9" * 40, "1e9"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--tokens '.*' must be a number from 1 to 1,000T, such as 1.3B"):
        parse_quantity(text, "--tokens")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xh10", "no device 'h10'; did you mean h100"),
        ("0xh100", "the number of devices must be from 1"),
        (f"{'9' * 30}xh100", "the number of devices must be from 1"),
        ("toaster", "no device 'toaster'; known: .*b200.*cpu"),
    ],
)
def test_what_is_no_device_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_devices(text)


@pytest.mark.parametrize(
    ("text", "name"), [("8xH100", "8xh100"), ("8xrtx-4090", "8xrtx-4090"), ("RTX 4090", "1xrtx-4090"), ("cpu", "1xcpu")]
)
def test_a_count_precedes_the_name_of_a_device_which_may_have_an_x_too(text: str, name: str) -> None:
    assert parse_devices(text).name == name


def test_devices_are_recognized_by_the_names_of_torch() -> None:
    for name, expected in (
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ):
        assert find_accelerator(name) == ACCELERATORS[expected], name
    assert find_accelerator("NVIDIA Tesla K80") is None


def test_calibration_needs_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="--calibrate needs b200 at hand, and this machine has no GPU"):
        device_at_hand(parse_devices("b200"))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    import_commands()
    words = ["plan", "transformer-lm", "dim=64", "depth=2", "heads=2", "--length", "64", "--tokens", "1M"]
    assert run_command([*words, "--devices", "2xl4", "--price", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["devices"] == "2xl4"
    assert plan["fits"] is True
    assert run_command([*words, "--calibrate"]) == 0
    text = capsys.readouterr().out
    assert "ten steps of this model on this machine" in text
    assert max(map(len, text.splitlines())) <= 300
    for extra, message in (
        (["--params", "1B"], "give either --params or these keywords"),
        (["--batch", "10"], "--batch 64 is the smallest"),
        (["--mfu", "0.4", "--calibrate"], "give one of them"),
    ):
        assert run_command([*words, *extra]) == 2
        assert message in capsys.readouterr().err
