"""Hashing attention: its limits, its dial, and what it refuses; chunks themselves are tested beside their operators."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from layouts import LAYOUTS, apart, differentiated, in_steps, place_of, real_of, tensors
from manyformer.base.errors import UserError
from manyformer.nn import Attention, KernelCall, LSHKernel
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.clustered.lsh_kernel import LSHVariant, normalize_keys
from manyformer.nn.core import LayerOutput, TokenPositions
from manyformer.nn.ops import softmax_attention as ops
from manyformer.nn.positions import NoPosition
from manyformer.nn.runtime.training_hooks import run_post_step_updates

FORMS: dict[str, dict[str, Any]] = {
    "strict": {"variant": "strict"},
    "published": {"variant": "published"},
    "both sides": {"variant": "published", "chunks_after": 1},
}


def run(
    kernel: LSHKernel, q: Tensor, v: Tensor, positions: TokenPositions, state: Any = None, **more: Any
) -> LayerOutput:
    actual: LayerOutput = kernel(KernelCall(q, q, v, positions, positions, NoPosition(), state, **more))
    return actual


def inputs() -> tuple[Tensor, Tensor]:
    q, _, v = tensors(2, 2, 6, 6)
    return q, v


def full(q: Tensor, v: Tensor, positions: TokenPositions, *, both: bool) -> Tensor:
    """Every token to all others that it may see, to itself where there are none."""
    here, there = positions.position_ids[:, None, :, None], positions.position_ids[:, None, None]
    same = (positions.segment_ids[:, None, :, None] == positions.segment_ids[:, None, None]) & (
        positions.segment_ids >= 0
    )[:, None, None]
    mask = same & (here != there if both else here > there)
    mask = mask | (same & (here == there) & ~mask.any(-1, keepdim=True))
    y, _ = ops.softmax_attention_reference(
        q,
        normalize_keys(q),
        v,
        mask,
        scale=1.0,
        position=NoPosition(),
        query_positions=positions,
        key_positions=positions,
    )
    return y


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_sorted_is_written_out(form: str, layout: str) -> None:
    (q, v), place, grad_output = inputs(), place_of(layout), torch.randn(2, 2, 23, 6).double() * real_of(layout)
    words: dict[str, Any] = {"num_buckets": 4, "chunk_length": 3, "num_hashes": 3, **FORMS[form]}
    kernels = [LSHKernel(**words, path=path) for path in ("sorted", "naive")]
    kernels[1].load_state_dict(kernels[0].state_dict())
    actual = [differentiated(run(kernel, q, v, place).y, grad_output, (q, v)) for kernel in kernels]
    real = real_of(layout)
    assert apart((actual[0][0] * real, *actual[0][1:]), (actual[1][0] * real, *actual[1][1:])) < 1e-10


@pytest.mark.parametrize("layout", ["plain", "left padding", "packed"])
@pytest.mark.parametrize("form", FORMS)
def test_one_bucket_and_one_chunk_are_full_attention(form: str, layout: str) -> None:
    (q, v), place, real = inputs(), place_of(layout), real_of(layout)
    expected = full(q, v, place, both="chunks_after" in FORMS[form]) * real
    assert (
        apart(
            (run(LSHKernel(num_buckets=1, chunk_length=12, num_hashes=2, **FORMS[form]), q, v, place).y * real,),
            (expected,),
        )
        < 1e-12
    )
    if form != "strict":
        # the published form does not hash what fits into a chunk
        kernel = LSHKernel(num_buckets=8, chunk_length=23, num_hashes=1, **FORMS[form])
        assert apart((run(kernel, q, v, place).y * real,), (expected,)) < 1e-12


def test_enough_rounds_are_full_attention() -> None:
    (q, v), place = inputs(), place_of("plain")
    kernel = LSHKernel(num_buckets=2, chunk_length=12, num_hashes=1)
    expected, errors = full(q, v, place, both=False), []
    for rounds in (1, 2, 4, 8, 64):
        kernel.num_hashes = rounds
        errors.append(float((run(kernel, q, v, place).y - expected).detach().abs().mean()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < errors[0] / 100


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_one_pass(layout: str) -> None:
    (q, v), place = inputs(), place_of(layout)
    kernel = LSHKernel(num_buckets=4, chunk_length=2, num_hashes=2)
    expected, real = run(kernel, q, v, place).y, real_of(layout)
    for sizes in ([1] * 23, [9, 1, 1, 12]):
        state, parts = kernel.init_state(2, device=q.device, dtype=q.dtype), []
        for part, here in in_steps(layout, sizes):
            so_far = place.columns(0, part.stop)
            end = slice(0, part.stop)
            y, state, _ = kernel(
                KernelCall(q[:, :, part], q[:, :, end], v[:, :, end], here, so_far, NoPosition(), state)
            )
            parts.append(y)
        assert apart((torch.cat(parts, 2) * real,), (expected * real,)) < 1e-12


def test_rotations_follow_from_the_seed_and_the_step() -> None:
    (q, v), place = inputs(), place_of("plain")

    def made(**words: Any) -> LSHKernel:
        torch.manual_seed(7)
        return LSHKernel(num_buckets=8, chunk_length=4, num_hashes=2, **words)

    one, other = made(), made()
    assert torch.equal(one._hash(q), other._hash(q))
    assert torch.equal(run(one, q, v, place).y, run(other, q, v, place).y)
    before = one._hash(q)
    run_post_step_updates(one, 3)
    assert not torch.equal(one._hash(q), before)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one._hash(q), other._hash(q))
    # more rounds begin with the same ones, and are no part of what is saved
    other.num_hashes = 5
    assert torch.equal(other._hash(q)[:2], one._hash(q))
    assert one.state_dict().keys() == {"seed", "number"}
    seldom, never = made(redraw=2), made(redraw=None)
    for kernel in (seldom, never):
        run_post_step_updates(kernel, 1)
        assert torch.equal(kernel._hash(q), before)
    run_post_step_updates(seldom, 2)
    assert not torch.equal(seldom._hash(q), before)


def test_weights_can_be_watched() -> None:
    (q, v), place, seen = inputs(), place_of("packed"), []
    kernel = LSHKernel(num_buckets=4, chunk_length=3, num_hashes=2)
    y = run(kernel, q, v, place, watch=lambda module, name, value: seen.append(value)).y
    assert apart((y,), (seen[0] @ v,)) < 1e-12
    assert "2 rounds of 4 buckets" in kernel.explain(KernelCall(q, q, v, place, place, NoPosition()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_buckets": 5}, r"buckets \(5\) must be 1 or even"),
        ({"chunk_length": 0}, r"chunk_length \(0\) must be at least 1"),
        ({"num_hashes": 0}, r"num_hashes \(0\) must be at least 1"),
        ({"chunks_after": 1}, r"chunks_after \(1\) must be 0 in the variant 'strict'"),
        ({"chunks_before": -1}, r"chunks_before \(-1\)"),
    ],
)
def test_sizes_of_buckets_and_chunks_that_cannot_be_hashed_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LSHKernel(**{"num_buckets": 4, "chunk_length": 4, "num_hashes": 1, **words})


def test_other_streams_are_refused() -> None:
    kernel = LSHKernel(num_buckets=4, chunk_length=4, num_hashes=1)
    with pytest.raises(ValueError, match="self-attention"):
        Attention(8, 2, kernel, source=CrossAttentionSource())
    with pytest.raises(ValueError, match="self-attention"):
        Attention(8, 2, kernel, kv_heads=1)
    published: LSHVariant = "published"
    (q, v), place = inputs(), place_of("plain")
    other = LSHKernel(num_buckets=4, chunk_length=4, num_hashes=1, variant=published)
    with pytest.raises(ValueError, match="cannot continue from a state"):
        run(other, q, v, place, other.init_state(2, device=q.device, dtype=q.dtype))


def test_a_saved_model_may_be_given_more_rounds(tmp_path: Path) -> None:
    sizes = {"vocab": 11, "dim": 8, "depth": 2, "heads": 2, "num_buckets": 4, "chunk_length": 4, "lsh_every": 2}
    model = mf.build("reformer-strict", num_hashes=1, **sizes).eval()
    model.save(tmp_path / "m")
    again = mf.load(tmp_path / "m", keywords={"num_hashes": 4})
    kernels = [part for part in again.modules() if isinstance(part, LSHKernel)]
    assert [kernel.num_hashes for kernel in kernels] == [4]
    assert again.spec.keywords["num_hashes"] == 4
    tokens = torch.randint(11, (2, 30))
    with torch.no_grad():
        assert not torch.equal(model(tokens).logits, again(tokens).logits)
        kernels[0].num_hashes = 1
        assert torch.equal(model(tokens).logits, again(tokens).logits)
    with pytest.raises(UserError, match="does not fit"):
        mf.load(tmp_path / "m", keywords={"dim": 16})
