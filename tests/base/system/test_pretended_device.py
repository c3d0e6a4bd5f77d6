"""The pretended device: what CUDA refuses it refuses, and it counts what would stall a GPU, with its place."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pretended_device import DEVICE, PretendedTensor, Waits, WrongDeviceError, numbers_of, pretended_device

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")


@pytest.fixture
def waits() -> Iterator[Waits]:
    with pretended_device() as counted:
        yield counted


def kinds(waits: Waits) -> list[str]:
    return [wait.kind for wait in waits.counts.elements()]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.zeros(2).to("cuda"),
        lambda: torch.zeros(2).cuda(),
        lambda: torch.tensor([1.0, 2.0], device="cuda"),
        lambda: torch.as_tensor([1.0, 2.0], device=DEVICE),
        lambda: torch.zeros(2).to(torch.ones(2, device="cuda")),
        lambda: torch.zeros(2, device="cuda").new_ones(3),
        lambda: torch.zeros(2, device="cuda").new_tensor([1.0]),
        lambda: torch.ones_like(torch.zeros(2, device="cuda")),
        lambda: torch.where(torch.ones(2, device="cuda") > 0, torch.ones(2, device="cuda"), 0.0),
        lambda: F.one_hot(torch.tensor([1, 2], device="cuda"), 4),
        lambda: nn.Linear(2, 2).to("cuda").weight,
        lambda: copy.deepcopy(nn.Linear(2, 2).to("cuda")).weight,
    ],
)
def test_tensors_are_on_the_device_however_they_come_there(waits: Waits, make: Callable[[], Tensor]) -> None:
    tensor = make()
    assert isinstance(tensor, PretendedTensor)
    assert tensor.device == DEVICE
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert not tensor.is_meta


def test_models_without_weights_stay_on_meta(waits: Waits) -> None:
    with torch.device("meta"):
        weight = nn.Linear(2, 2).weight
    assert weight.device.type == "meta"
    assert not isinstance(weight, PretendedTensor)


def test_tied_weights_stay_tied_when_a_model_moves(waits: Waits) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second).to("cuda")
    assert first.weight is second.weight
    assert isinstance(first.weight, nn.Parameter)
    model.cpu()
    assert type(first.weight.data) is Tensor
    assert first.weight is second.weight


@pytest.mark.parametrize(
    "mix",
    [
        lambda gpu, cpu: gpu + cpu,
        lambda gpu, cpu: cpu * gpu,
        lambda gpu, cpu: gpu @ cpu,
        lambda gpu, cpu: torch.cat([gpu, cpu]),
        lambda gpu, cpu: cpu.add_(gpu),
        lambda gpu, cpu: torch.zeros(()).add_(gpu.sum()),
        lambda gpu, cpu: F.embedding(torch.tensor([1]), gpu),
        lambda gpu, cpu: gpu.index_select(0, torch.tensor([1])),
        lambda gpu, cpu: cpu[torch.tensor([1], device="cuda")],
        lambda gpu, cpu: gpu.masked_fill(cpu > 0, 0.0),
        lambda gpu, cpu: torch.where(cpu > 0, gpu, gpu),
        lambda gpu, cpu: F.linear(gpu, cpu),
        lambda gpu, cpu: F.layer_norm(gpu, (3,), cpu[0], cpu[1]),
        lambda gpu, cpu: torch.randn(3, device="cuda", generator=torch.Generator()),
    ],
)
def test_tensors_of_two_devices_are_refused(waits: Waits, mix: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(WrongDeviceError, match="cuda:0"):
        mix(torch.randn(3, 3, device="cuda"), torch.randn(3, 3))


@pytest.mark.parametrize(
    "mix",
    [
        lambda gpu: gpu * torch.tensor(2.0),
        lambda gpu: torch.where(gpu > 0, gpu, torch.tensor(0.0)),
        lambda gpu: gpu.masked_fill(gpu > 0, torch.tensor(0.0)),
        lambda gpu: gpu.clone().fill_(torch.tensor(1.0)),
        lambda gpu: torch.maximum(gpu, torch.tensor(1.0)),
    ],
)
def test_numbers_of_the_host_are_taken_without_a_wait(waits: Waits, mix: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(3, 3)
    gpu = values.to("cuda")
    waits.clear()
    assert torch.equal(numbers_of(mix(gpu)), mix(values))
    assert not waits.total()


WAITS: dict[str, tuple[Callable[[Tensor], object], list[str]]] = {
    "item": (lambda x: x[0, 0].item(), ["item"]),
    "float": (lambda x: float(x.sum()), ["item"]),
    "truth": (lambda x: bool((x > 0).any()), ["item"]),
    "list": (lambda x: x.tolist(), ["copy to the host"]),
    "cpu": (lambda x: x.cpu(), ["copy to the host"]),
    "print of a number": (lambda x: f"{x.sum().item():.3f}", ["item"]),
    "equal": (lambda x: torch.equal(x, x), ["equal"]),
    "nonzero": (lambda x: x.nonzero(), ["nonzero"]),
    "unique": (lambda x: x.unique(), ["unique2"]),
    "masked select": (lambda x: x.masked_select(x > 0), ["masked_select"]),
    "index by a mask": (lambda x: x[x > 0], ["index by a mask"]),
    "index by a list": (lambda x: x[[0, 1]], ["copy to the device"]),
    "index of the host": (lambda x: x[torch.tensor([0, 1])], ["index copied to the device"]),
    "repeats": (
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 3], device="cuda"), 0),
        ["copy to the device", "repeat_interleave without output_size"],
    ),
    "numbers of the host": (lambda x: torch.tensor([1.0], device="cuda"), ["copy to the device"]),
    "pageable memory": (lambda x: torch.ones(3).to("cuda", non_blocking=True), ["copy to the device"]),
    "pinned, but blocking": (lambda x: torch.ones(3).pin_memory().to("cuda"), ["copy to the device"]),
    "copy_": (lambda x: x.copy_(torch.ones(3, 3)), ["copy to the device"]),
    "copy_ to the host": (lambda x: torch.ones(3, 3).copy_(x), ["copy to the host"]),
    "check of a factorization": (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3, device="cuda")), []),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_is_counted_once(waits: Waits, name: str) -> None:
    wait, expected = WAITS[name]
    gpu = torch.randn(3, 3).to("cuda")
    waits.clear()
    wait(gpu)
    found = kinds(waits)
    assert found == expected or name == "check of a factorization"
    if name == "check of a factorization":
        # `cholesky` looks whether it has failed
        assert found


@pytest.mark.parametrize(
    "quiet",
    [
        lambda x: torch.ones(3).pin_memory().to("cuda", non_blocking=True),
        lambda x: x.masked_fill(x > 0, 1.0),
        lambda x: x.index_put((x > 0,), torch.zeros((), device="cuda")),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: x.sort().values.cumsum(0)[:, :2],
        lambda x: x[torch.zeros(2, dtype=torch.long, device="cuda")],
        lambda x: torch.arange(5, device="cuda") + x.shape[0],
        lambda x: x.to("cuda").to(x.device).cuda(),
    ],
)
def test_what_needs_no_wait_is_not_counted(waits: Waits, quiet: Callable[[Tensor], object]) -> None:
    gpu = torch.randn(3, 3).to("cuda")
    waits.clear()
    quiet(gpu)
    assert not waits.total(), str(waits)


def test_moving_a_tensor_to_its_own_device_gives_the_tensor_itself(waits: Waits) -> None:
    gpu = torch.randn(3, device="cuda")
    assert gpu.to("cuda") is gpu
    assert gpu.to(DEVICE, torch.float32) is gpu
    assert gpu.to(torch.float64).dtype == torch.float64


def test_autocast_casts_as_on_cuda(waits: Waits) -> None:
    x = torch.randn(4, 4, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        product = x @ x
        assert product.dtype == torch.bfloat16
        assert F.linear(x, x).dtype == torch.bfloat16
        assert product.exp().dtype == torch.float32
        assert product.softmax(-1).dtype == torch.float32
        # on a CPU it would be bfloat16
        assert F.layer_norm(product, (4,)).dtype == torch.float32
        assert torch.addcmul(x, product, product).dtype == torch.float32
        assert (product + product).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float32
    product.float().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    ones = torch.ones(4, 4)
    values = x.detach().cpu()
    torch.testing.assert_close(x.grad.cpu(), ones @ values.mT + values.mT @ ones, rtol=0.03, atol=0.03)


def test_the_device_has_random_numbers_of_its_own(waits: Waits) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    on_device = torch.rand(4, device="cuda")
    assert torch.equal(numbers_of(on_device), expected)
    # the draw on the device has left those of the CPU where they were
    assert torch.equal(torch.rand(4), expected)
    torch.cuda.set_rng_state(state)
    assert torch.equal(numbers_of(torch.rand(4, device="cuda")), expected)


def test_packed_sequences_of_an_lstm_give_the_values_and_gradients_of_the_cpu(waits: Waits) -> None:
    lstm, x = nn.LSTM(4, 5, batch_first=True), torch.randn(3, 6, 4)
    lengths = torch.tensor([6, 4, 1])

    def run(device: str) -> list[Tensor]:
        part = copy.deepcopy(lstm).to(device)
        packed = pack_padded_sequence(x.to(device), lengths, batch_first=True)
        y, _ = pad_packed_sequence(part(packed)[0], batch_first=True)
        y.square().sum().backward()
        return [y.detach(), *(weight.grad for weight in part.parameters() if weight.grad is not None)]

    for actual, expected in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(numbers_of(actual), expected)


def test_views_by_stride_and_products_written_out_are_those_of_the_cpu(waits: Waits) -> None:
    x = torch.randn(4, 6)

    def band(x: Tensor) -> Tensor:
        later = x[1:]
        return later.as_strided((2, 3), (7, 1), later.storage_offset() + 1)

    assert torch.equal(numbers_of(band(x.to("cuda"))), band(x))
    out = torch.zeros(3, 5, 1, device="cuda")
    torch.matmul(x[:3, None].to("cuda"), x[0, :, None].to("cuda"), out=out[:, :1])
    torch.testing.assert_close(numbers_of(out)[:, 0], x[:3] @ x[0, :, None])


def test_flex_attention_shows_the_listed_blocks_alone(waits: Waits) -> None:
    q = torch.randn(1, 2, 256, 16)
    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, 256, 256, device="cuda")
    gpu = q.to("cuda").requires_grad_()
    y = torch.compile(torch.nn.attention.flex_attention.flex_attention)(gpu, gpu, gpu, block_mask=mask)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(numbers_of(y), expected)
    y.sum().backward()
    assert gpu.grad is not None
    # without the block that is seen as a whole, the last queries see only the keys of their own block
    mask.full_kv_num_blocks = None
    y = torch.nn.attention.flex_attention.flex_attention(gpu, gpu, gpu, block_mask=mask)
    assert not torch.allclose(numbers_of(y)[0, 0, -1], expected[0, 0, -1])
    assert flex_attention is not torch.nn.attention.flex_attention.flex_attention


def test_torch_is_as_before_outside_the_device() -> None:
    names = [(torch, "tensor"), (torch, "compile"), (torch.Tensor, "to"), (torch.cuda, "is_available")]
    before = [getattr(owner, name) for owner, name in names]
    with pytest.raises(KeyError), pretended_device():
        raise KeyError
    assert [getattr(owner, name) for owner, name in names] == before
    assert not torch.__future__.get_swap_module_params_on_conversion()
