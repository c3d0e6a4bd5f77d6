"""Attention transfer: what is imitated, what learns, and what cannot be."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import TransferConfig
from manyformer.conversion.surgery.attention_transfer import LayerTransfer, describe_transfer, transfer_attention
from manyformer.conversion.surgery.conversion import ModelPair
from manyformer.data.tokenizers.native_tokenizers import CharTokenizer
from manyformer.models import Model
from manyformer.nn import Attention, split_heads
from manyformer.nn.batches import CausalLMBatch
from manyformer.nn.core import Context, contiguous_positions

VOCAB, LENGTH = 40, 24
SIZES: dict[str, Any] = {"vocab": VOCAB, "dim": 32, "depth": 2, "heads": 4, "dropout": 0.0}
Match = Literal["outputs", "weights"]


def build(recipe: str = "transformer-lm", **keywords: Any) -> Model:
    """A model whose attention is far from uniform, so that no untrained map imitates it."""
    model = mf.build(recipe, **{**SIZES, **keywords}).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def batch(*, padding: int = 0) -> CausalLMBatch:
    """Rows whose last `padding` tokens are padding."""
    tokens = torch.randint(VOCAB, (4, 2 * LENGTH), generator=torch.Generator().manual_seed(1))[:, : LENGTH + padding]
    segments = (torch.arange(LENGTH + padding) >= LENGTH).long().neg().expand(4, -1)
    return CausalLMBatch(tokens, tokens, segments if padding else None)


def transfer(model: Model, new_model: Model, match: Match, *, steps: int = 30, padding: int = 0) -> list[LayerTransfer]:
    batches: Iterator[CausalLMBatch] = itertools.repeat(batch(padding=padding))
    config = TransferConfig(steps=steps, match=match)
    return transfer_attention(ModelPair.of(model, new_model), batches, config, lambda step, loss: None)


def attentions(model: Model) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def inputs_of(model: Model) -> list[Tensor]:
    """The inputs of all attentions for the tokens of `batch`."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
        for layer in attentions(model)
    ]
    model(batch().tokens)
    for hook in hooks:
        hook.remove()
    return inputs


@pytest.mark.parametrize("padding", [0, 5])
@torch.no_grad()
def test_the_losses_are_those_of_the_definition(padding: int) -> None:
    model = build()
    layers: dict[Match, list[LayerTransfer]] = {}
    for match in get_args(Match):
        new_model = mf.convert(model, kernel="hedgehog").model
        layers[match] = transfer(model, new_model, match, steps=1, padding=padding)
    # the step has changed the maps
    new_model = mf.convert(model, kernel="hedgehog").model
    context = Context(contiguous_positions(4, 0, LENGTH, torch.device("cpu")))
    triples = zip(attentions(model), attentions(new_model), inputs_of(model), strict=True)
    for number, (teacher, student, x) in enumerate(triples):
        y, student_y = teacher(x, context).y, student(x, context).y
        error = (student_y - y).square().mean() / y.square().mean()
        assert layers["outputs"][number].before == pytest.approx(float(error), rel=1e-4)
        q, (k, _) = split_heads(teacher.q_proj(x), 4), teacher.project_kv(x, context.positions)
        past = torch.ones(LENGTH, LENGTH).tril() > 0
        weights = (q @ k.mT / 8**0.5).masked_fill(~past, -torch.inf).softmax(-1)
        products = q.softmax(-1) @ k.softmax(-1).mT + (-q).softmax(-1) @ (-k).softmax(-1).mT
        estimates = (products * past) / (products * past).sum(-1, keepdim=True)
        divergence = torch.where(past, weights * (weights / estimates).log(), 0.0).sum(-1).mean()
        assert layers["weights"][number].before == pytest.approx(float(divergence), rel=1e-3)


@pytest.mark.parametrize(
    ("kernel", "match"),
    [*itertools.product(("t2r", "hedgehog", "lolcats"), ("outputs", "weights")), ("rfa", "outputs")],
)
def test_new_kernels_alone_learn_to_imitate(kernel: str, match: Match) -> None:
    model = build("llama", kv_heads=2)
    new_model = mf.convert(model, kernel=kernel, window=3).model
    old = {name: value.clone() for name, value in model.state_dict().items()}
    before = {name: value.clone() for name, value in new_model.state_dict().items()}
    layers = transfer(model, new_model, match)
    assert [layer.name for layer in layers] == ["body.0.attention.inner", "body.1.attention.inner"]
    assert all(layer.after < 0.97 * layer.before for layer in layers)
    learned = {name for name, value in new_model.state_dict().items() if not torch.equal(value, before[name])}
    assert learned
    assert all(".kernel." in name for name in learned)
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in new_model.parameters())
    assert all(parameter.grad is None for parameter in (*model.parameters(), *new_model.parameters()))


def with_tokenizer(model: Model) -> Model:
    model.tokenizer = CharTokenizer("abcdefghijklmnopqrstuvwxyz \n.")
    return model


def test_convert_transfers_on_the_text_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 40)
    steps: list[int] = []
    model, config = with_tokenizer(build(max_length=16)), TransferConfig(steps=20)
    _, report = mf.convert(
        model,
        kernel="t2r",
        transfer=config,
        data=tmp_path / "text.txt",
        on_progress=lambda step, loss: steps.append(step),
    )
    assert steps == list(range(1, 21))
    assert all(layer.after < layer.before for layer in report.transfers)
    assert describe_transfer(report.transfers, config).startswith("attention transfer, 20 steps")
    untrained = mf.convert(model, kernel="t2r").report
    assert report.difference != untrained.difference
    assert not untrained.transfers


@pytest.mark.parametrize(
    ("to", "keywords", "message"),
    [
        (None, {"kernel": "linear"}, "trains new kernels with weights, such as t2r and hedgehog: there is none"),
        (None, {"window": 8, "kernel": "window"}, "there is none"),
        (None, {"kernel": "t2r", "depth": 4}, "compares equal depths"),
        (None, {"kernel": "t2r", "depth": 1, "loops": 2}, "is applied several times"),
        ("early-exit-lm", {}, "a conversion to early-exit-lm makes none"),
    ],
)
def test_what_has_nothing_to_learn_is_refused(
    to: str | None, keywords: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    with pytest.raises(UserError, match=message):
        mf.convert(
            with_tokenizer(build()), to, transfer=TransferConfig(steps=1), data=tmp_path / "text.txt", **keywords
        )


def test_text_that_cannot_be_is_refused(tmp_path: Path) -> None:
    config, file = TransferConfig(steps=1), tmp_path / "text.txt"
    with pytest.raises(UserError, match="needs data: a text to learn from"):
        mf.convert(build(), kernel="t2r", transfer=config)
    with pytest.raises(UserError, match="needs transfer: its number of steps"):
        mf.convert(build(), kernel="t2r", data=file)
    with pytest.raises(UserError, match="this transformer-lm has no tokenizer"):
        mf.convert(build(), kernel="t2r", transfer=config, data=file)
    with pytest.raises(UserError, match=r"text\.txt"):
        mf.convert(with_tokenizer(build()), kernel="t2r", transfer=config, data=file)
    file.write_text("")
    with pytest.raises(UserError, match=r"text\.txt"):
        mf.convert(with_tokenizer(build()), kernel="t2r", transfer=config, data=file)
    file.write_text("the quick brown fox " * 40)
    config = TransferConfig(steps=1, match="weights")
    with pytest.raises(UserError, match="weights of RandomFourierFeatures may be negative: match outputs"):
        mf.convert(with_tokenizer(build()), kernel="rfa", transfer=config, data=file)
    config = TransferConfig(steps=9, lr=1e30)
    with pytest.raises(UserError, match=r"diverged at step \d+: lower its learning rate, 1e\+30"):
        mf.convert(with_tokenizer(build()), kernel="t2r", transfer=config, data=file)


def test_a_run_transfers_before_its_first_step(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 60)
    settings = [
        *("dim=16", "depth=1", "heads=2", f"data.path={text}", "data.length=16", "data.packing=concat"),
        *("batch.tokens=64", "limits.steps=1", "device=cpu", "compile=off"),
    ]
    mf.train("transformer-lm", [*settings, f"out={tmp_path / 'source'}"], on_event=lambda event: None)
    lines: list[str] = []
    run = [*settings, f"init_from={tmp_path / 'source'}", "model.kernel=hedgehog", "transfer.steps=10", "seed=1"]
    mf.train("transformer-lm", [*run, f"out={tmp_path / 'out'}"], on_event=lambda event: lines.append(str(event)))
    notes = "\n".join(lines)
    assert "attention transfer: step 10/10, loss" in notes
    assert "attention transfer, 10 steps, squared error of its output" in notes
    with pytest.raises(UserError, match="needs init_from"):
        mf.train("transformer-lm", [*settings, "model.kernel=t2r", "transfer.steps=5"])
