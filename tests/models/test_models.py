"""Whole models: parameters, losses, refusals, and how they are kept on disk."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import manyformer as mf
from editing import edit_record
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import NotWritable
from manyformer.base.files.verified_folder import write_manifest
from manyformer.models import ClassHead, Model
from manyformer.models.head import MIN_CHUNKED_CLASSES
from manyformer.nn.batches import (
    IGNORE_INDEX,
    CausalLMBatch,
    ClassificationBatch,
    MaskedLMBatch,
    Seq2SeqBatch,
    TaggingBatch,
)
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.structures import NO_NODE, preorder_columns

SMALL = {"vocab": 29, "dim": 16, "depth": 2, "heads": 4}
NAMES = ["transformer", "transformer-lm", "bert", "transformer-classifier", "structural", "compose"]


def batch_for(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A batch with padding and ignored targets, and the inputs of a forward call on it."""
    tokens, length = torch.randint(3, 29, (3, 7)), 7
    segments = torch.where(torch.arange(length) < torch.tensor([[7], [3], [5]]), 0, PADDING_SEGMENT)
    targets = torch.where((torch.rand(3, length) < 0.6) & (segments == 0), tokens.roll(1, 1), IGNORE_INDEX)
    if name == "transformer":
        target = torch.randint(3, 29, (3, length))
        return Seq2SeqBatch(tokens, target, targets, segments), (tokens, target, segments)
    if name == "bert":
        return MaskedLMBatch(tokens, targets, segments), (tokens, segments)
    if name == "transformer-classifier":
        return ClassificationBatch(tokens, torch.tensor([0, 1, 1]), segments), (tokens, segments)
    if name == "structural":
        trees = torch.from_numpy(preorder_columns(range(length))).repeat(3, 1, 1)
        trees[:, 0] = NO_NODE
        return TaggingBatch(tokens, targets, segments, trees), (tokens, segments, trees)
    return CausalLMBatch(tokens, targets, segments), (tokens, segments)


def test_the_base_transformer_has_the_parameters_of_the_paper() -> None:
    with torch.device("meta"):
        model = mf.build("transformer", vocab=37000)
    assert sum(value.numel() for value in model.parameters()) == 63_082_496


def test_three_matrices_are_one() -> None:
    model: Any = mf.build("transformer", **SMALL)
    assert model.embed_source.token.weight is model.embed_target.token.weight is model.head.weight
    for name in ("transformer-lm", "bert", "compose"):
        tied: Any = mf.build(name, **SMALL)
        assert tied.embed.token.weight is tied.head.weight


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_loss_is_the_cross_entropy_of_the_logits(name: str, smoothing: float) -> None:
    model = mf.build(name, **SMALL).eval()
    batch, inputs = batch_for(name)
    wanted = batch.labels if name == "transformer-classifier" else batch.targets
    logits = model(*inputs).logits
    expected = F.cross_entropy(
        logits.flatten(0, -2), wanted.flatten(), ignore_index=IGNORE_INDEX, label_smoothing=smoothing, reduction="sum"
    )
    loss = model.loss(batch, label_smoothing=smoothing)
    torch.testing.assert_close(loss.total, expected)
    assert loss.targets == (wanted != IGNORE_INDEX).sum()
    assert loss.extra == 0.0
    with torch.no_grad():
        score = model.score(batch)
    plain = F.cross_entropy(logits.flatten(0, -2), wanted.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(score.nll, plain.double(), check_device=False, atol=1e-4, rtol=1e-6)
    assert score.correct == (logits.argmax(-1) == wanted).sum()
    assert score.targets == loss.targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_large_vocabularies_lose_in_chunks_and_just_as_much(bias: bool, smoothing: float) -> None:
    head = ClassHead(8, MIN_CHUNKED_CLASSES, bias=bias, transform=nn.Linear(8, 8))
    with torch.no_grad():
        for value in head.parameters():
            value.normal_()
    # more tokens than one chunk, and not a multiple of it
    x = torch.randn(2, 300, 8, requires_grad=True)
    targets = torch.where(torch.rand(2, 300) < 0.2, IGNORE_INDEX, torch.randint(0, MIN_CHUNKED_CLASSES, (2, 300)))
    loss = head.loss(x, targets, label_smoothing=smoothing)
    expected = F.cross_entropy(
        head(x).flatten(0, 1), targets.flatten(), label_smoothing=smoothing, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    torch.testing.assert_close(loss.total, expected, rtol=1e-5, atol=0)
    leaves = [x, *head.parameters()]
    actual = torch.autograd.grad(loss.total / loss.targets, leaves)
    wanted = torch.autograd.grad(expected / loss.targets, leaves)
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4)


def test_the_chunked_loss_never_holds_all_logits() -> None:
    """2048 tokens x 16384 classes are 134 MB of logits; saving them for the way back must show."""
    head, x = ClassHead(16, 2 * MIN_CHUNKED_CLASSES), torch.randn(2048, 16, requires_grad=True)
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        head.loss(x, torch.randint(0, 2 * MIN_CHUNKED_CLASSES, (2048,)), label_smoothing=0.1)
    assert max(saved) < 2048 * 2 * MIN_CHUNKED_CLASSES / 4


def test_no_targets_lose_nothing() -> None:
    model = mf.build("bert", **SMALL)
    tokens = torch.ones(2, 4, dtype=torch.long)
    loss = model.loss(MaskedLMBatch(tokens, torch.full((2, 4), IGNORE_INDEX), None))
    assert loss.total == 0
    assert loss.targets == 0


def test_a_classifier_reads_all_tokens_but_padding() -> None:
    model = mf.build("transformer-classifier", **SMALL).eval()
    tokens = torch.randint(0, 29, (1, 6))
    padded = torch.cat([torch.randint(0, 29, (1, 3)), tokens], dim=1)
    segments = torch.tensor([[PADDING_SEGMENT] * 3 + [0] * 6])
    torch.testing.assert_close(model(padded, segments).logits, model(tokens).logits, atol=1e-6, rtol=0)
    for position in range(6):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 29
        assert (model(changed).logits - model(tokens).logits).abs().max() > 1e-5


def test_a_tagger_is_told_of_trees_in_three_numbers_a_token(unchecked: None) -> None:
    model = mf.build("structural", **SMALL).eval()
    tokens = torch.randint(0, 29, (1, 4))
    with pytest.raises(ValueError, match="structural positions need the tree of every sentence: pass `trees`"):
        model(tokens)
    with pytest.raises(ValueError, match=r"trees \(1, 4\) must have three numbers for each of \(1, 4\)"):
        model(tokens, None, tokens)
    one, other = (torch.from_numpy(preorder_columns(heads))[None] for heads in ([0, 1, 2, 3], [0, 1, 1, 1]))
    assert (model(tokens, None, one).logits - model(tokens, None, other).logits).abs().max() > 1e-4
    blind: Any = mf.build("structural", **SMALL, absolute="sequential", relative="sequential").eval()
    assert torch.equal(blind(tokens, None, one).logits, blind(tokens).logits)


def test_too_long_a_sequence_is_refused() -> None:
    model = mf.build("transformer-lm", **SMALL, max_length=5)
    with pytest.raises(ValueError, match="6 tokens are more than this model allows: it was built with max_length=5"):
        model(torch.zeros(1, 6, dtype=torch.long))
    state = model(torch.zeros(1, 5, dtype=torch.long), state=model.init_state(1)).state  # type: ignore[operator]
    with pytest.raises(ValueError, match="position 5 does not exist: the model was built for max_length=5"):
        model(torch.zeros(1, 1, dtype=torch.long), state=state)


class WithoutLoss(Model):
    """A model that defines neither what its head predicts from nor a loss."""


def test_a_model_without_a_loss_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="WithoutLoss defines neither head_inputs nor loss and score"):
        WithoutLoss().loss(batch_for("transformer-lm")[0])


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_is_the_same_model(name: str, tmp_path: Path) -> None:
    model = mf.build(name, **SMALL).eval()
    _, inputs = batch_for(name)
    model.save(tmp_path / "model")
    loaded = mf.load(tmp_path / "model")
    assert not loaded.training
    assert loaded.spec == model.spec
    assert (loaded(*inputs).logits == model(*inputs).logits).all()
    assert {p.name for p in tmp_path.iterdir()} == {"model"}
    assert {p.name for p in (tmp_path / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "manifest.json",
        ".verified.json",
    }
    # a run keeps its final model one folder down
    assert (mf.load(tmp_path)(*inputs).logits == model(*inputs).logits).all()


def test_saving_again_replaces_the_folder_as_a_whole(tmp_path: Path) -> None:
    model = mf.build("transformer-lm", **SMALL)
    model.save(tmp_path / "model")
    (tmp_path / "model" / "stale").touch()
    mf.build("bert", **SMALL).save(tmp_path / "model")
    assert mf.load(tmp_path / "model").spec.recipe == "bert"
    assert not (tmp_path / "model/stale").exists()
    assert os.listdir(tmp_path) == ["model"]


def test_parts_are_written_beside_what_others_are_writing(tmp_path: Path) -> None:
    """Each process writes its own files into a checkpoint, and a draft of theirs may be gone a moment later."""
    (tmp_path / ".draft").symlink_to("gone")
    mf.build("transformer-lm", **SMALL).write_files(tmp_path)
    write_manifest(tmp_path)
    assert mf.load(tmp_path).spec.recipe == "transformer-lm"


def test_a_failed_save_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mf.build("transformer-lm", **SMALL)
    model.save(tmp_path / "model")

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("manyformer.models.model_files.save_model", full)
    with pytest.raises(NotWritable, match="No space left"):
        mf.build("bert", **SMALL).save(tmp_path / "model")
    assert mf.load(tmp_path / "model").spec.recipe == "transformer-lm"
    assert os.listdir(tmp_path) == ["model"]


def damage(folder: Path, how: str) -> None:
    config, weights = folder / "config.json", folder / "model.safetensors"
    tensors = load_file(str(weights))
    match how:
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "no header":
            weights.write_bytes(b"not a tensor in sight")
        case "weights gone":
            weights.unlink()
        case "config gone":
            config.unlink()
        case "config cut":
            config.write_text(config.read_text()[:20])
        case "tensor gone":
            save_file({k: v for k, v in tensors.items() if k != "body.1.ff.inner.up.weight"}, str(weights))
        case "tensor too many":
            save_file(tensors | {"body.9.bias": torch.zeros(1)}, str(weights))
        case "other size":
            edit_record(config, lambda content: content["keywords"].update(dim=24))
        case "other recipe":
            edit_record(config, lambda content: content.update(recipe="transformer-lmm"))
        case "other format":
            edit_record(config, lambda content: content.update(format=99))
        case "number for a recipe":
            edit_record(config, lambda content: content.update(recipe=5))
        case "no keywords":
            edit_record(config, lambda content: content.update(keywords=None))
        case "deep":
            config.write_text("[" * 100_000)
        case "a folder for weights":
            weights.unlink()
            weights.mkdir()
    if how not in ("flipped", "manifest gone", "config gone", "weights gone", "a folder for weights", "cut short"):
        # as somebody would who wants it to be read
        write_manifest(folder)
    if how == "flipped":
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(content)
    if how == "manifest gone":
        (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut short", r"model\.safetensors is damaged: it has [\d,]+ bytes instead of [\d,]+"),
        ("flipped", r"model\.safetensors is damaged: it is not as it was written"),
        ("manifest gone", r"manifest\.json is missing"),
        ("a folder for weights", r"model\.safetensors is not a file"),
        (
            "other format",
            r"config\.json was written in format 99 by manyformer .* reads format 2",
        ),
        ("number for a recipe", r"config\.json is damaged: recipe: input should be a valid string, got 5"),
        ("no keywords", r"config\.json is damaged: keywords: input should be an object, got None"),
        ("deep", r"config\.json is damaged: it is not the description of a model \(recursion limit exceeded"),
        ("no header", r"model\.safetensors is damaged"),
        ("weights gone", r"holds no weights: model\.safetensors is missing"),
        ("config gone", r"holds no model: config\.json is missing"),
        ("config cut", r"config\.json is damaged: it is not the description of a model"),
        ("tensor gone", r"does not fit its config\.json: body\.1\.ff\.inner\.up\.weight is missing"),
        ("tensor too many", r"does not fit its config\.json: it holds body\.9\.bias, which the model does not have"),
        ("other size", r"does not fit its config\.json: \S+ has the shape \([\d, ]+\), the model \([\d, ]+\)"),
        ("other recipe", r"config\.json: there is no recipe 'transformer-lmm'; did you mean transformer-lm"),
    ],
)
def test_damage_is_named(how: str, message: str, tmp_path: Path) -> None:
    mf.build("transformer-lm", **SMALL).save(tmp_path / "model")
    damage(tmp_path / "model", how)
    with pytest.raises(UserError, match=message):
        mf.load(tmp_path / "model")


def test_a_keyword_that_only_the_model_refuses_names_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    mf.build("llama", vocab=11, dim=8, depth=1, heads=2, ff_dim=8).save(folder)
    # a number of heads by itself, and none that divides the width
    edit_record(folder / "config.json", lambda record: record["keywords"].update(heads=3))
    write_manifest(folder)
    with pytest.raises(UserError, match=r"config\.json is damaged: dim \(8\) must be a multiple of heads \(3\)"):
        mf.load(folder)
    # what the caller asks for is not the file's fault
    with pytest.raises(UserError, match=r"^dim \(8\) must be a multiple of heads \(5\)"):
        mf.load(folder, keywords={"heads": 5})


def test_loading_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a folder; a saved model is a folder with config\.json"):
        mf.load(tmp_path / "nothing")
