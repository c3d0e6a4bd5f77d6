"""Recurrences by fla-core: what is handed over, with stand-ins of its operators on a CPU."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from fla_operators import ARGUMENTS, OPTIONS, load_stand_in
from manyformer.nn import LinearKernel
from manyformer.nn.linear import fla_recurrence, matrix_recurrence
from manyformer.nn.linear.deterministic import EluPlusOneFeatures
from manyformer.nn.masks import Causal
from perturbing import perturb

LENGTH, WIDTH, VALUES = 13, 4, 6
RUNS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 5, [1] * 13, [0] * 13])
CASES = [(decays, corrects) for corrects in (False, True) for decays in (None, 1, WIDTH)]
IDS = [fla_recurrence.operator_name(decays, corrects=corrects) + f" {decays}" for decays, corrects in CASES]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_recurrence, "load_operator", load_stand_in)
    monkeypatch.setattr(fla_recurrence, "fla_refusal", lambda device, dtype, key_dim, *, has_decay_per_head: None)


def inputs_of(decays: int | None, *, corrects: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(3, 2, *shape, generator=generator)

    tensors = {"q": draw(LENGTH, WIDTH), "k": torch.nn.functional.normalize(draw(LENGTH, WIDTH), dim=-1)}
    tensors |= {"v": draw(LENGTH, VALUES), "memory": draw(WIDTH, VALUES)}
    if decays is not None:
        tensors["decay"] = -draw(LENGTH, decays).abs()
    if corrects:
        tensors["strength"] = draw(LENGTH).sigmoid()
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def results_of(function: Any, tensors: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Outputs, the last memory, and all gradients of both."""
    result = function(**tensors, **options)
    total = sum((x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in result)
    return [*result, *torch.autograd.grad(total, list(tensors.values()))]


@pytest.mark.parametrize("run", [None, RUNS], ids=["one document", "packed"])
@pytest.mark.parametrize(("decays", "corrects"), CASES, ids=IDS)
@pytest.mark.usefixtures("stand_ins")
def test_outputs_states_and_gradients(decays: int | None, corrects: bool, run: Tensor | None) -> None:
    tensors = inputs_of(decays, corrects=corrects)
    actual = results_of(fla_recurrence.chunked, tensors, run=run, dtype=torch.float32)
    expected = results_of(matrix_recurrence.recurrent, tensors, run=run)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("stand_ins")
def test_products_are_of_half_precision_and_memories_are_not() -> None:
    tensors = inputs_of(WIDTH, corrects=True)
    y, memory = fla_recurrence.chunked(**tensors, dtype=torch.bfloat16)
    expected = matrix_recurrence.recurrent(**tensors)
    assert (y.dtype, memory.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.float(), expected.y, atol=0.1, rtol=0.02)


def test_where_documents_begin() -> None:
    starts = fla_recurrence.document_starts(RUNS)
    assert starts.offsets.tolist() == [0, 5, 8, 13, 26, 39]
    assert starts.continues.tolist() == [1, 0, 0, 0, 1]
    assert starts.rows.tolist() == [0, 0, 0, 1, 2]
    assert starts.last.tolist() == [2, 3, 4]


RECIPES = ("gla", "retnet", "lightning", "hgrn2", "mamba-2", "deltanet", "gated-deltanet", "kda")


def build_pair(name: str) -> tuple[Any, Any]:
    """Two models with the same weights, of which the second takes fla-core."""
    models: list[Any] = []
    for path in ("auto", "fla"):
        torch.manual_seed(0)
        model: Any = mf.build(name, vocab=29, dim=16, depth=2, heads=4)
        perturb(model, 0.2)
        for module in model.modules():
            if isinstance(module, LinearKernel):
                module.path = path
        models.append(model.eval())
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("stand_ins")
def test_recipes(name: str) -> None:
    """Packed rows with padding, gradients, and a text in two calls with a state."""
    ours, reference = build_pair(name)
    tokens = torch.randint(0, 29, (2, 21))
    segments = torch.tensor([[0] * 9 + [1] * 12, [-1] * 4 + [0] * 11 + [1] * 3 + [-1] * 3])
    visible = (segments >= 0)[..., None]
    logits = [model(tokens, segments).logits * visible for model in (ours, reference)]
    torch.testing.assert_close(logits[1], logits[0], atol=2e-5, rtol=1e-4)
    gradients = [
        torch.autograd.grad(x.square().sum(), list(model.parameters()), allow_unused=True)
        for x, model in zip(logits, (ours, reference))
    ]
    torch.testing.assert_close(gradients[1], gradients[0], atol=2e-3, rtol=1e-3)
    with torch.no_grad():
        state = reference(tokens[:, :10], state=reference.init_state(2)).state
        continued = reference(tokens[:, 10:], state=state).logits
        torch.testing.assert_close(continued, ours(tokens).logits[:, 10:], atol=2e-5, rtol=1e-4)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    refusal = partial(fla_recurrence.fla_refusal, has_decay_per_head=False)
    assert refusal(torch.device("cpu"), torch.bfloat16, 64) == "fla-core needs a GPU, not the device cpu"
    monkeypatch.setattr(fla_recurrence, "is_installed", lambda: True)
    assert refusal(cuda, torch.bfloat16, 64) is None
    assert refusal(cuda, torch.float32, 64) == "fla-core computes in bfloat16 and float16, not float32"
    assert refusal(cuda, torch.float16, 512) == "fla-core serves keys of at most 256 channels, not 512"
    monkeypatch.setattr(fla_recurrence, "is_installed", lambda: False)
    assert refusal(cuda, torch.bfloat16, 64) == "fla-core is not installed (pip install 'manyformer[fla]')"


@pytest.mark.parametrize(
    ("triton", "capability", "is_refused"),
    [("3.6.0", 9, True), ("3.4.0", 9, True), ("3.7.1", 9, False), ("3.3.1", 9, False), ("3.6.0", 8, False)],
)
def test_gradients_of_decays_per_head_are_refused_where_triton_compiles_them_wrongly(
    monkeypatch: pytest.MonkeyPatch, triton: str, capability: int, is_refused: bool
) -> None:
    monkeypatch.setattr(fla_recurrence, "is_installed", lambda: True)
    monkeypatch.setattr(fla_recurrence, "version", lambda package: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    fla_recurrence._triton_is_wrong_on_hopper.cache_clear()
    try:
        refusal = partial(fla_recurrence.fla_refusal, torch.device("cuda"), torch.bfloat16, 64)
        assert (refusal(has_decay_per_head=True) is not None) == is_refused
        # decays of channels and forward passes have other kernels
        assert refusal(has_decay_per_head=False) is None
        with torch.no_grad():
            assert refusal(has_decay_per_head=True) is None
    finally:
        fla_recurrence._triton_is_wrong_on_hopper.cache_clear()


def test_a_forced_path_is_refused_in_a_sentence() -> None:
    _, reference = build_pair("gla")
    with pytest.raises(ValueError, match="path 'fla' cannot serve this call: fla-core needs a GPU"):
        reference(torch.zeros(1, 5, dtype=torch.long))


def test_a_normalizer_has_no_such_path() -> None:
    features = EluPlusOneFeatures()
    with pytest.raises(ValueError, match="path 'fla' must be auto or one of chunked, quadratic, recurrent here"):
        LinearKernel(features, Causal(), path="fla")


@pytest.mark.skipif(
    not fla_recurrence.is_installed(), reason="fla-core is not installed: pip install 'manyformer[fla]'"
)
@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_the_package_takes_these_arguments(name: str) -> None:
    triton = pytest.importorskip("triton", reason="fla-core needs triton, which is for GPUs")
    try:
        triton.runtime.driver.active.get_current_target()
    except RuntimeError as error:
        pytest.skip(f"fla-core needs a GPU that Triton finds: {error}")
    parameters = inspect.signature(fla_recurrence.load_operator(name)).parameters
    assert parameters.keys() >= ARGUMENTS[name] | OPTIONS
