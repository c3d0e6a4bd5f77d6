"""Models of several parts: each fusion against loops over one example at a time, missing parts, and two towers."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models import Model
from manyformer.models.modalities_model import MAX_SCALE, TwoTowers
from manyformer.models.tasks.example_parts import retrieval_scores
from manyformer.nn.attention.modality_fusion import BottleneckFusion, CrossFusion, JointFusion
from manyformer.nn.batches import IGNORE_INDEX, ModalitiesBatch
from manyformer.nn.core import Context, MemorySequence, contiguous_positions, no_watch

SIZES: dict[str, Any] = {
    **{"vocab": 13, "height": 4, "width": 6, "channels": 1, "patch": 2, "mels": 5},
    **{"dim": 8, "depth": 2, "heads": 2, "dropout": 0.0},
}
FUSIONS = ("joint", "cross", "bottleneck")


def build(name: str, **keywords: Any) -> Any:
    torch.manual_seed(0)
    model = mf.build(name, **SIZES | keywords)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return model.double().eval()


def examples() -> ModalitiesBatch:
    """Four examples: with all parts, without an image, without sound, and a text alone; padding of several lengths."""
    generator = torch.Generator().manual_seed(2)
    segments = torch.zeros(4, 9, dtype=torch.long)
    segments[1, 6:] = segments[2:] = -1
    words = torch.zeros(4, 5, dtype=torch.long)
    words[0, 3:] = -1
    return ModalitiesBatch(
        torch.tensor([0, 1, 1, 0]),
        torch.randint(256, (4, 4, 6, 1), dtype=torch.uint8, generator=generator),
        torch.randn(4, 9, 5, generator=generator, dtype=torch.float64),
        torch.randint(5, 13, (4, 5), generator=generator),
        torch.tensor([0, -1, 0, -1]),
        segments,
        words,
    )


def alone(batch: ModalitiesBatch, row: int) -> ModalitiesBatch:
    """One example with the parts that it has, without padding and segments."""
    assert batch.images is not None
    assert batch.frames is not None
    assert batch.tokens is not None
    assert batch.image_segments is not None
    assert batch.frame_segments is not None
    assert batch.token_segments is not None
    frames, words = (part[row] == 0 for part in (batch.frame_segments, batch.token_segments))
    return ModalitiesBatch(
        batch.labels[row : row + 1],
        batch.images[row : row + 1] if batch.image_segments[row] == 0 else None,
        batch.frames[row : row + 1, frames] if frames.any() else None,
        batch.tokens[row : row + 1, words] if words.any() else None,
    )


def layer_by_hand(layer: Any, x: Tensor, memory: Tensor | None) -> Tensor:
    """A chain of residual branches for one row, whose attention is that of a plain softmax."""
    for name, branch in layer.named_children():
        normed = branch.pre_norm(x)
        if name == "attention":
            x = x + attention_by_hand(branch.inner, normed, normed)
        elif name == "cross":
            x = x if memory is None else x + attention_by_hand(branch.inner.inner, normed, memory)
        else:
            x = x + branch.inner(normed, Context(contiguous_positions(1, 0, x.shape[1], x.device))).y
    return x


def attention_by_hand(attention: Any, x: Tensor, source: Tensor) -> Tensor:
    q = attention.q_proj(x)
    k, v = attention.kv_proj(source).chunk(2, -1)
    width = x.shape[-1] // attention.heads
    heads = []
    for head in range(attention.heads):
        columns = slice(head * width, (head + 1) * width)
        weights = (q[0, :, columns] @ k[0, :, columns].T / math.sqrt(width)).softmax(-1)
        heads.append(weights @ v[0, :, columns])
    return attention.out_proj(torch.cat(heads, -1))[None]


def fused_by_hand(fusion: Any, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a fusion makes of the parts of one example."""
    if isinstance(fusion, JointFusion):
        x = torch.cat(list(parts.values()), 1)
        for layer in fusion.body.children():
            x = layer_by_hand(layer, x, None)
        return dict(zip(parts, x.split([part.shape[1] for part in parts.values()], 1)))
    if isinstance(fusion, CrossFusion):
        for layers in fusion.layers:
            others = {name: [part for other, part in parts.items() if other != name] for name in parts}
            parts = {
                name: layer_by_hand(layers[name], part, torch.cat(others[name], 1) if others[name] else None)
                for name, part in parts.items()
            }
        return parts
    assert isinstance(fusion, BottleneckFusion)
    bottleneck = fusion.bottleneck[None]
    for number, layers in enumerate(fusion.layers):
        if number < fusion.first:
            parts = {name: layer_by_hand(layers[name], part, None) for name, part in parts.items()}
            continue
        wholes = {
            name: layer_by_hand(layers[name], torch.cat([part, bottleneck], 1), None) for name, part in parts.items()
        }
        bottleneck = torch.stack([full[:, parts[name].shape[1] :] for name, full in wholes.items()]).mean(0)
        parts = {name: full[:, : parts[name].shape[1]] for name, full in wholes.items()}
    return parts


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_row_is_what_loops_over_its_parts_give(fusion: str) -> None:
    model, batch = build("multimodal-transformer", fusion=fusion, classes=3), examples()
    logits = model(*batch.inputs).logits
    for row in range(4):
        embedded = {name: part.y for name, part in model.embed(alone(batch, row)).items()}
        parts = fused_by_hand(model.fusion, embedded)
        expected = model.head(torch.stack([part.mean(1) for part in parts.values()]).mean(0))
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_missing_part_is_a_model_run_without_it(fusion: str) -> None:
    model, batch = build("multimodal-transformer", fusion=fusion, classes=3), examples()
    logits = model(*batch.inputs).logits
    for row in range(4):
        torch.testing.assert_close(logits[row : row + 1], model(*alone(batch, row).inputs).logits, rtol=0, atol=1e-9)
    changed = batch._replace(images=255 - batch.images)  # type: ignore[operator]
    rest = model(*changed.inputs).logits
    torch.testing.assert_close(rest[[1, 3]], logits[[1, 3]])
    assert not torch.allclose(rest[[0, 2]], logits[[0, 2]])


@pytest.mark.parametrize("fusion", FUSIONS)
def test_gradients_of_parts_that_no_row_has_are_finite(fusion: str) -> None:
    model, batch = build("multimodal-transformer", fusion=fusion, classes=3), examples()
    without = batch._replace(image_segments=torch.full((4,), -1))
    model.loss(without).total.backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
    assert not model.embed.parts["image"].project.weight.grad.any()


@pytest.mark.parametrize("fusion", FUSIONS)
def test_parts_of_no_tokens_are_missing_parts(fusion: str) -> None:
    model, batch = build("multimodal-transformer", fusion=fusion), examples()
    assert batch.frames is not None
    empty = model(batch.images, batch.frames[:, :0]).logits
    torch.testing.assert_close(empty, model(batch.images).logits)


def test_what_cannot_be_read_is_refused() -> None:
    model, batch = build("multimodal-transformer", mels=None), examples()
    with pytest.raises(UserError, match="this model reads image, text, and is given the part sound"):
        model(*batch.inputs)
    with pytest.raises(UserError, match="the batch has no part"):
        model()
    nothing = dict.fromkeys(("height", "width", "channels", "mels"))
    with pytest.raises(UserError, match="one at least of an image, sound and a text"):
        mf.build("multimodal-transformer", **nothing)
    with pytest.raises(UserError, match=r"two towers read two parts .* \['image', 'sound', 'text'\]"):
        mf.build("clip", **SIZES)
    with pytest.raises(ValueError, match=r"first \(3\) must be a layer from 0 to 1"):
        build("multimodal-transformer", fusion_layer=3)
    with pytest.raises(UserError, match=r"fusion_layer \(1\) is for fusion=bottleneck"):
        build("multimodal-transformer", fusion="joint", fusion_layer=1)
    with pytest.raises(UserError, match="a height, a width and channels, and these are 4, None and 1"):
        build("clip", width=None)
    with pytest.raises(UserError, match="compares image and sound, and the batch has no sound"):
        build("clip", vocab=None)(batch.images)


def towers() -> TwoTowers:
    model = build("clip", mels=None, shared_dim=6)
    assert isinstance(model, TwoTowers)
    return model


def pairs() -> ModalitiesBatch:
    batch = examples()
    return ModalitiesBatch(batch.labels, batch.images, tokens=batch.tokens, token_segments=batch.token_segments)


@torch.no_grad()
def test_the_loss_of_pairs_is_a_sum_over_rows_and_columns() -> None:
    model, batch = towers(), pairs()
    first, second = model.embeddings(batch)
    expected = 0.0
    for row in range(4):
        cosines = [float(model.similarity.scale * F.cosine_similarity(first[row], second[i], 0)) for i in range(4)]
        expected += 0.5 * (math.log(sum(map(math.exp, cosines))) - cosines[row])
        cosines = [float(model.similarity.scale * F.cosine_similarity(first[i], second[row], 0)) for i in range(4)]
        expected += 0.5 * (math.log(sum(map(math.exp, cosines))) - cosines[row])
    assert float(model.loss(batch).total) == pytest.approx(expected)
    assert float(model.score(batch).nll) == pytest.approx(expected, rel=1e-5)
    halves = model(*batch.inputs).logits.chunk(2, -1)
    torch.testing.assert_close(halves[0] @ halves[1].mT, model.similarity.scale * first @ second.mT)


def test_ignored_rows_are_not_compared() -> None:
    model, batch = towers(), pairs()
    partly = batch._replace(labels=torch.tensor([0, IGNORE_INDEX, 1, IGNORE_INDEX]))
    rest = ModalitiesBatch(*(None if part is None else part[[0, 2]] for part in batch))  # type: ignore[arg-type]
    torch.testing.assert_close(model.loss(partly).total, model.loss(rest).total)
    nothing = model.loss(batch.ignored())
    assert int(nothing.targets) == 0
    assert float(nothing.total.detach()) == 0
    nothing.total.backward()


def test_the_temperature_is_bounded() -> None:
    model = towers()
    assert float(model.similarity.scale.detach()) < MAX_SCALE
    with torch.no_grad():
        model.similarity.log_scale.fill_(9.0)
    assert float(model.similarity.scale.detach()) == MAX_SCALE


def test_retrieval_counts_pairs_one_by_one() -> None:
    first = F.normalize(torch.randn(30, 4, dtype=torch.float64), dim=-1)
    second = F.normalize(first + torch.randn(30, 4, dtype=torch.float64), dim=-1)
    labels = torch.arange(30) % 5
    hits, same = {1: 0, 10: 0}, 0
    for queries, items in ((first, second), (second, first)):
        for i in range(30):
            order = sorted(range(30), key=lambda j: -float(queries[i] @ items[j]))
            same += int(labels[order[0]] == labels[i])
            for rank in hits:
                hits[rank] += i in order[:rank]
    values = {score.name: score.value for score in retrieval_scores(first, second, labels)}
    assert values == pytest.approx(
        {"recall at 1": hits[1] / 0.6, "recall at 10": hits[10] / 0.6, "same label": same / 0.6}
    )
    # parts that are all equal are no success
    assert retrieval_scores(first[:1].expand(30, -1), second[:1].expand(30, -1), labels)[1].value == 0


def test_the_layers_of_parts_can_be_watched() -> None:
    model: Model = build("multimodal-transformer", fusion="cross")
    names = {module: name for name, module in model.named_modules()}
    seen = set[str]()
    model(*examples().inputs, watch=lambda module, name, value: seen.add(names[module]))
    assert any("cross" in name for name in seen)
    sequence = MemorySequence(
        torch.zeros(1, 2, 8, dtype=torch.float64), contiguous_positions(1, 0, 2, torch.device("cpu"))
    )
    alone_output = model.fusion({"text": sequence}, no_watch)  # type: ignore[operator]
    assert alone_output.keys() == {"text"}
