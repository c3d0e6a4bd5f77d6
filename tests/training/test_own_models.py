"""`mf.train` with modules and data of the caller's own: killed and resumed, against a loop by hand, and refusals."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_program import CASES, DATA, GRU, ROWS, SETTINGS, VOCAB, without_dropout
from own_program import rows_of as metrics_of
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.training import TrainingEvent, silent
from manyformer.training.events import TrainingNote


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("own")
    command = [sys.executable, str(Path(__file__).with_name("own_program.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("name", [f"{model}-{kind}" for model, kind in CASES])
def test_a_killed_run_resumes_to_the_same_losses(name: str, played: dict[str, Any]) -> None:
    if name.startswith("x-transformers") and importlib.util.find_spec("x_transformers") is None:
        pytest.skip("x-transformers is not installed, whose model this trains")
    run = played[name]
    assert run["statuses"] == [0, -9, 0]
    assert run["whole"][-1]["step"] == 12
    assert run["resumed"] == run["whole"]


def settings(out: Path, **others: Any) -> dict[str, Any]:
    constant = {"name": "constant", "warmup": 0}
    return {"out": str(out), "limits": {"steps": 4}, "schedule": constant, "log": {"every": 1}, **others}


@pytest.mark.slow
def test_two_processes_train_and_score_as_one_does(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("own_program.py")
    done = subprocess.run(
        [*launcher, str(script), str(tmp_path / "two")], capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    alone = {**SETTINGS, "out": str(tmp_path / "one")}
    mf.train(without_dropout, alone, data=DATA["loader"](), eval_data=[ROWS[:7]], on_event=silent)
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert [row["tokens"] for row in two] == [row["tokens"] for row in one]
    for name in ("loss", "valid_loss"):
        expected = [row[name] for row in one if name in row]
        assert [row[name] for row in two if name in row] == pytest.approx(expected, rel=1e-4)


class Doubled(GRU):
    """Logits and loss together, where the target is given."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(tokens)
        if targets is None:
            return logits[:, -1:]
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Named(GRU):
    """What Hugging Face models return."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = super().forward(input_ids)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


PAIRS = [(rows[:, :-1], rows[:, 1:]) for rows in ROWS.split(8)]
FORMS: dict[str, tuple[type[nn.Module], list[Any]]] = {
    "token rows": (GRU, list(ROWS.split(8))),
    "pairs": (GRU, PAIRS),
    "pairs of lists": (GRU, [list(pair) for pair in PAIRS]),
    "named targets": (GRU, [{"tokens": tokens, "targets": targets} for tokens, targets in PAIRS]),
    "a target for forward": (Doubled, PAIRS),
    "labels for forward": (Named, [{"input_ids": rows, "labels": rows} for rows in ROWS.split(8)]),
    "torch's order of classes": (type("Turned", (GRU,), {"forward": lambda m, x: GRU.forward(m, x).mT}), PAIRS),
}


@pytest.mark.parametrize("form", FORMS)
def test_own_batches_of_each_form_train_as_a_loop_by_hand_does(form: str, tmp_path: Path) -> None:
    kind, batches = FORMS[form]
    torch.manual_seed(5)
    trained, by_hand = kind(), GRU()
    by_hand.load_state_dict(trained.state_dict())
    for module in (trained, by_hand):
        module.drop.p = 0.0
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    losses = []
    for rows in ROWS.split(8)[:4]:
        logits = by_hand(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result = mf.train(trained, settings(tmp_path, optim={"name": "adam", "lr": 0.01}), data=batches, on_event=silent)
    assert [row["loss"] for row in metrics_of(tmp_path)] == pytest.approx(losses, rel=1e-5)
    # the module itself has the weights, and so has the file, under its own names
    torch.testing.assert_close(trained.state_dict(), by_hand.state_dict(), rtol=1e-4, atol=1e-5)
    other = kind()
    load_model(other, str(result.out / "model" / "model.safetensors"))
    torch.testing.assert_close(other.state_dict(), trained.state_dict())


def test_a_model_of_the_library_learns_the_same_from_each_form_of_own_batches(tmp_path: Path) -> None:
    model = mf.build("transformer-lm", vocab=VOCAB, dim=16, depth=1, heads=2, dropout=0.0, max_length=16)
    labelled = [{"input_ids": rows, "labels": rows, "attention_mask": torch.ones_like(rows)} for rows in ROWS.split(8)]
    losses = []
    for number, batches in enumerate((list(ROWS.split(8)), PAIRS, labelled)):
        fresh = mf.build("transformer-lm", **model.spec.keywords)
        fresh.load_state_dict(model.state_dict())
        result = mf.train(fresh, settings(tmp_path / str(number)), data=batches, eval_data=batches[:1], on_event=silent)
        losses.append([row["loss"] for row in metrics_of(tmp_path / str(number)) if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
    loaded = result.load()
    torch.testing.assert_close(loaded.state_dict(), fresh.state_dict())
    assert result.scores["loss"] < losses[0][0]


def test_the_loss_of_unequal_batches_is_a_mean_over_their_targets(tmp_path: Path) -> None:
    pairs = [(ROWS[:2, :-1], ROWS[:2, 1:]), (ROWS[2:9, :-1], ROWS[2:9, 1:].clone())]
    pairs[1][1][:3] = -100
    logits = {}
    for name, kind in (("logits", GRU), ("loss", Doubled)):
        torch.manual_seed(5)
        module = kind().eval()
        chosen = settings(tmp_path / name, limits={"steps": 1}, batch={"accumulate": 2})
        module.drop.p = 0.0
        mf.train(module, chosen, data=pairs, on_event=silent)
        logits[name] = metrics_of(tmp_path / name)[0]["loss"]
    assert logits["loss"] == pytest.approx(logits["logits"], rel=1e-6)


def test_a_loss_of_the_caller_is_the_one_that_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    inputs, aims = torch.randn(8, 3), torch.randn(8, 2)
    first = F.l1_loss(module(inputs), aims).item()
    mf.train(module, settings(tmp_path), data=[(inputs, aims)], loss=F.l1_loss, on_event=silent)
    losses = [row["loss"] for row in metrics_of(tmp_path)]
    assert losses[0] == pytest.approx(first)
    assert losses[-1] < losses[0]
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == {"weight", "bias"}


def test_each_row_of_a_data_set_is_read_once_in_an_epoch(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counted(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    data = Counted(ROWS[:, :-1], ROWS[:, 1:])
    chosen = settings(tmp_path, limits={"epochs": 2}, batch={"tokens": 7 * 12})
    result = mf.train(GRU, chosen, data=data, on_event=silent)
    # six batches of 7 rows, the last of them with 5
    assert result.step == 12
    orders = seen[-80:-40], seen[-40:]
    assert [sorted(order) for order in orders] == [list(range(40))] * 2
    assert orders[0] != orders[1]


def test_the_columns_of_a_data_set_of_hugging_face_are_arguments(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed, whose Dataset this reads")
    data = datasets.Dataset.from_dict({"input_ids": ROWS.tolist(), "labels": ROWS.tolist()})
    heard: list[TrainingEvent] = []
    chosen = settings(tmp_path, batch={"tokens": 8 * 13}, limits={"epochs": 1})
    result = mf.train(Named, chosen, data=data, eval_data=data, on_event=heard.append)
    assert result.step == 5
    assert metrics_of(tmp_path)[-1]["tokens"] == ROWS[:, 1:].numel()
    with pytest.raises(UserError, match="the batch has words, which the forward of own:Named does not take"):
        mf.train(Named, settings(tmp_path / "other"), data=data.add_column("words", ["a"] * 40), on_event=silent)


def test_a_resumed_run_tells_that_its_data_has_changed(tmp_path: Path) -> None:
    mf.train(GRU, settings(tmp_path), data=list(ROWS.split(8)), on_event=silent)
    heard: list[TrainingEvent] = []
    longer = settings(tmp_path, limits={"steps": 5})
    mf.train(GRU, longer, data=list(ROWS.flip(0).split(8)), on_event=heard.append)
    notes = [event.text for event in heard if isinstance(event, TrainingNote)]
    assert "reading past the first 4 batches of data, which this run has been trained on" in notes
    assert any("is not the one that this run has read there" in note for note in notes)


TOKENS = list(ROWS.split(8))
REFUSALS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "no data": (GRU, {}, {}, "needs data="),
    "a number": (3, {}, {"data": TOKENS}, "the model is a int; give an nn.Module"),
    "no module": (lambda: 3, {}, {"data": TOKENS}, "must give an nn.Module, and it gave a int"),
    "no weights": (nn.ReLU, {}, {"data": TOKENS}, "own:ReLU has no parameters"),
    "a model that needs sizes": (nn.Linear, {}, {"data": TOKENS}, "own:Linear needs model.in_features"),
    "data that is no iterable": (GRU, {}, {"data": 3}, "data is a int; give a DataLoader"),
    "no batches": (GRU, {}, {"data": []}, "data gave 0 batches"),
    "an iterator that ends": (GRU, {}, {"data": iter(TOKENS[:2])}, "data gave 2 batches and has no more"),
    "epochs without a length": (GRU, {"limits": {"epochs": 1}}, {"data": lambda: iter(TOKENS)}, "data with a length"),
    "tokens of whole batches": (GRU, {"batch": {"tokens": 9}}, {"data": TOKENS}, "batch.tokens is 9, but data gives"),
    "words": (GRU, {}, {"data": ["a b"]}, "data gave a str; a batch is"),
    "columns": (GRU, {}, {"data": [{"tokens": TOKENS[0], "idx": TOKENS[0]}]}, "the batch has idx, which the forward"),
    "unclear labels": (GRU, {}, {"data": [{"tokens": TOKENS[0], "labels": TOKENS[0]}]}, "whether they are shifted"),
    "aims": (GRU, {}, {"data": [(TOKENS[0], TOKENS[0].float())]}, "give the loss, such as loss="),
    "shapes": (GRU, {}, {"data": [(TOKENS[0], TOKENS[0][:, 1:])]}, "output of shape (8, 13, 23) for targets of shape"),
    "smoothing": (Doubled, {"loss": {"label_smoothing": 0.1}}, {"data": PAIRS}, "computes its loss itself"),
    "recomputation": (GRU, {"activation_checkpointing": True}, {"data": TOKENS}, "activation_checkpointing=true needs"),
    "processes": (GRU, {"devices": 2}, {"data": TOKENS}, "torchrun --nproc-per-node 2 PROGRAM.py"),
    "patience": (
        GRU,
        {"evaluate": {"patience": 2}},
        {"data": TOKENS},
        "evaluate.patience needs scores: give eval_data",
    ),
    "a keyword": (GRU, {"model": {"width": 3}}, {"data": TOKENS}, "width"),
    "other data": (GRU, {"data": {"kind": "text"}}, {"data": TOKENS}, "those that are given as objects"),
    "ragged rows": (
        GRU,
        {},
        {"data": type("R", (TensorDataset,), {"__getitem__": lambda d, i: ROWS[i, : 3 + i % 2]})(ROWS)},
        "rows of different sizes",
    ),
    "own data of a run": ("lm/stdlib", {}, {"eval_data": TOKENS}, "names its own data"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mistake_in_an_own_training_is_named_in_a_sentence(name: str, tmp_path: Path) -> None:
    model, others, keywords, sentence = REFUSALS[name]
    with pytest.raises(UserError) as refused:
        mf.train(model, settings(tmp_path, **others), on_event=silent, **keywords)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_built_model_takes_no_other_keywords(tmp_path: Path) -> None:
    model = mf.build("llama", vocab=VOCAB, dim=16, depth=1, heads=2)
    with pytest.raises(UserError, match=r"model\.depth cannot be set: the llama that is given is built already"):
        mf.train(model, settings(tmp_path, model={"depth": 2}), data=TOKENS, on_event=silent)


def test_loading_an_own_run_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    from manyformer.recipes.parts.registry import OWN_RECIPES

    mf.train(GRU, settings(tmp_path), data=DataLoader(ROWS, 8), on_event=silent)
    known = OWN_RECIPES.pop("own:GRU")
    try:
        with pytest.raises(UserError, match="own:GRU is a module of the user's own"):
            mf.load(tmp_path)
    finally:
        OWN_RECIPES["own:GRU"] = known
