"""Checkpoints are whole or not there: damage is found by name, a full disk harms nothing, the right ones are kept."""

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeFeed, FakeSource, a_run
from runs import Heard, go, learned, stopped
from safetensors.torch import load_file

import manyformer as mf
from full_disk import no_file_longer_than
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import DiskFull
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.config import AdamWConfig, RunConfig
from manyformer.models.tasks import Task
from manyformer.nn.batches import Batch, CausalLMBatch
from manyformer.training import checkpoints
from manyformer.training import process_state as rng
from manyformer.training.checkpoints import CheckpointStore
from manyformer.training.engine import TrainingEngine
from manyformer.training.events import CheckpointSaved, TrainingEvent
from manyformer.training.process_group import DDPStrategy
from manyformer.training.training_loop import TrainingDiverged


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("model.safetensors", cut, "bytes instead of"),
    ("model.safetensors", flip, "not as it was written"),
    ("optimizer.safetensors", Path.unlink, "is missing"),
    ("state.json", flip, "not as it was written"),
    ("manifest.json", Path.unlink, "is missing"),
    ("manifest.json", cut, "is not the list of files of a folder"),
]


@pytest.mark.parametrize(("name", "harm", "said"), DAMAGES)
def test_damage_is_told_by_name_and_passed_over(
    name: str, harm: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    full, run = a_run(tmp_path / "whole"), a_run(tmp_path / "run")
    go(full)
    stopped(run, 9)
    store = CheckpointStore(tmp_path / "run/checkpoints")
    assert store.steps() == [4, 8, 9]
    harm(store.path(9) / name)
    heard = Heard()
    go(run, heard)
    assert f"{store.path(9) / name} is" in heard.notes
    assert said in heard.notes
    assert "Resuming from step 8" in heard.notes
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    assert not list(store.folder.glob("damaged-*"))


def test_nothing_whole_is_left(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    stopped(run, 5)
    for folder in (tmp_path / "run/checkpoints").iterdir():
        (folder / "state.json").unlink()
    with pytest.raises(UserError, match=r"step-00000005/state.json is missing;.*start over"):
        go(run)


def test_drafts_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    stopped(run, 5)
    folder = tmp_path / "run/checkpoints"
    shutil.copytree(folder / "step-00000005", folder / ".step-00000006.part")
    go(run)
    assert not list(folder.glob(".*"))


def scripted_validation(losses: list[float]) -> Callable[..., dict[str, float]]:
    """Losses in their order in place of what validation finds; the names of scores are asked for with sums of 0."""
    remaining = iter(losses)
    return lambda _task, sums, _units: {"loss": next(remaining) if sums.nats else 0.0, "accuracy": 0.0}


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "run", limits={"steps": 20}, evaluate={"every": 3}, save={"every": 4, "keep_last": 2, "keep_best": 2}
    )
    losses = [5.0, 1.0, 2.0, 4.0, 4.0, 4.0, 3.0]
    seen: dict[int, set[int]] = {}
    store = CheckpointStore(tmp_path / "run/checkpoints")

    def watch(event: TrainingEvent) -> None:
        if isinstance(event, CheckpointSaved):
            seen[event.step] = set(store.steps())

    heard = Heard()
    heard.append = watch  # type: ignore[method-assign,assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "validation", scripted_validation(losses))
        result = go(run, heard)
    # evaluated at 3, 6, 9, ..., 18 and 20; the best are 6 and 9, the last regular ones 16 and 20
    assert store.steps() == [6, 9, 16, 20]
    assert result.chosen_weights == "those of step 6, the best"
    best = load_file(tmp_path / "run/checkpoints/step-00000006/model.safetensors")
    final = load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(best[name], final[name]) for name in best)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_a_damaged_best_checkpoint_is_named_and_the_next_best_taken(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    settings = {"limits": {"steps": 16}, "evaluate": {"every": 4}, "save": {"every": 4, "keep_best": 3}}
    run = a_run(tmp_path / "run", **settings)
    best = tmp_path / "run/checkpoints/step-00000004/model.safetensors"

    def damage(step: int) -> None:
        if step == 14:
            harm(best)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "validation", scripted_validation([1.0, 3.0, 2.0, 4.0]))
        heard = Heard(damage)
        result = go(run, heard)
    assert result.chosen_weights == "those of step 12, the best of the intact ones"
    assert result.scores["loss"] == 2.0
    assert f"{best} is " in heard.notes
    chosen = load_file(tmp_path / "run/checkpoints/step-00000012/model.safetensors")
    final = load_file(tmp_path / "run/model/model.safetensors")
    assert all(torch.equal(chosen[name], final[name]) for name in chosen)


def test_a_damaged_checkpoint_is_left_out_of_the_average(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", limits={"steps": 16}, save={"every": 4, "keep_last": 4, "average_last": 3})
    averaged: list[Path] = []

    def damage(step: int) -> None:
        if step == 14:
            flip(tmp_path / "run/checkpoints/step-00000012/model.safetensors")

    with pytest.MonkeyPatch.context() as patch:
        average = TrainingEngine.average_checkpoints

        def record(engine: TrainingEngine, folders: Sequence[Path]) -> None:
            averaged.extend(folders)
            average(engine, folders)

        patch.setattr(TrainingEngine, "average_checkpoints", record)
        heard = Heard(damage)
        go(run, heard)
    assert [folder.name for folder in averaged] == ["step-00000008", "step-00000016"]
    assert "step-00000012/model.safetensors is damaged" in heard.notes


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    whole, run = a_run(tmp_path / "whole"), a_run(tmp_path / "run")
    go(whole)
    stopped(run, 5)
    with no_file_longer_than(3000), pytest.raises(DiskFull) as full:
        go(run)
    assert "the checkpoint of step 8" in str(full.value)
    assert "\n" not in str(full.value)
    assert "step-00000005 is intact. Free some space: the same command continues." in str(full.value)
    store = CheckpointStore(tmp_path / "run/checkpoints")
    assert store.steps() == [4, 5]
    assert VerifiedFolder.open(store.path(5)).find_damage() is None
    assert not list(store.folder.glob(".*"))
    go(run)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")


@pytest.mark.parametrize(("owner", "name"), [(rng.GeneratorStates, "of_process"), (checkpoints, "write_manifest")])
def test_no_space_left_on_device(owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path / "run")
    stopped(run, 5)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(DiskFull, match=r"^the disk is full: the checkpoint of step 8 "):
        go(run)
    assert CheckpointStore(tmp_path / "run/checkpoints").steps() == [4, 5]


def test_a_loss_that_is_no_number_stops(tmp_path: Path) -> None:
    source = FakeSource("language-model")
    run = a_run(tmp_path / "run")

    def spoil(weights: dict[str, Any]) -> None:
        weights["embed.token.weight"].data.fill_(float("nan"))

    with pytest.raises(
        TrainingDiverged, match=r"the loss is nan at step 7; the last good checkpoint is .*step-00000004"
    ):
        _with_poison(run, source, spoil)
    _is_finite(tmp_path / "run")


def test_a_gradient_that_is_not_finite_stops(tmp_path: Path) -> None:
    source = FakeSource("language-model")
    run = a_run(tmp_path / "run", save={"every": 1})

    def spoil(weights: dict[str, Any]) -> None:
        weights["body.0.ff.inner.up.weight"].register_hook(lambda gradient: gradient * float("inf"))

    with pytest.raises(
        TrainingDiverged, match=r"the norm of the gradient is (nan|inf) at step 7 .*; the last good .*step-00000006"
    ):
        _with_poison(run, source, spoil)
    _is_finite(tmp_path / "run")


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    source = FakeSource("language-model")
    run = a_run(tmp_path / "run", optim={"lr": 1e-2, "max_grad_norm": None}, save={"every": 1})

    def spoil(weights: dict[str, Any]) -> None:
        weights["body.0.ff.inner.up.weight"].register_hook(lambda gradient: gradient * float("inf"))

    problem = r"the norm of the gradient is (nan|inf) at step 7 \(first that of body.0.ff.inner.up.weight\)"
    with pytest.raises(TrainingDiverged, match=f"{problem}; the last good .*step-00000006"):
        _with_poison(run, source, spoil)
    _is_finite(tmp_path / "run")


def _with_poison(run: RunConfig, source: FakeSource, spoil: Callable[[dict[str, Any]], None]) -> None:
    from manyformer.training import session

    build_model = session.build_model

    class Feed(FakeFeed):
        fetched = 0

        def __next__(self) -> Batch:
            Feed.fetched += 1
            if Feed.fetched == 7:
                spoil(weights)
            return super().__next__()

    weights: dict[str, Any] = {}

    def build(*given: Any) -> Any:
        model = build_model(*given)
        weights.update(model.named_parameters())
        return model

    source.train = Feed("language-model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "build_model", build)
        go(run, opened=lambda *_: source)


def _is_finite(out: Path) -> None:
    store = CheckpointStore(out / "checkpoints")
    assert store.steps()
    for step in store.steps():
        for file in ("model", "optimizer"):
            tensors = load_file(store.path(step) / f"{file}.safetensors")
            assert all(value.isfinite().all() for value in tensors.values())


def test_a_checkpoint_is_a_model(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    stopped(run, 5)
    model = mf.load(tmp_path / "run/checkpoints/step-00000005")
    tokens = torch.full((1, 3), 5)
    assert model(tokens).logits.shape == (1, 3, 11)


def test_no_pickle(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    stopped(run, 5)
    for file in (tmp_path / "run/checkpoints").rglob("*.*"):
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.is_file():
            load_file(file)


def test_average(tmp_path: Path) -> None:
    a, b, c = (mf.build("transformer-lm", vocab=11, dim=8, depth=1, heads=1, max_length=8) for _ in range(3))
    for name, model in (("a", a), ("b", b)):
        model.save(tmp_path / name)
    engine = TrainingEngine(c, AdamWConfig(lr=0.1), DDPStrategy())
    engine.average_checkpoints([tmp_path / "a", tmp_path / "b", tmp_path / "b"])
    assert c.embed.token.weight is c.head.weight
    for one, two, three in zip(a.parameters(), b.parameters(), c.parameters(), strict=True):
        torch.testing.assert_close(three, (one + 2 * two) / 3)
    engine.average_checkpoints([tmp_path / "a"] * 4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True))


@pytest.mark.parametrize("of_average", [0.5, 1.5])
def test_the_average_is_the_model_only_where_it_is_better(
    of_average: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # at steps 4, 8, 12, and the average of all three
    monkeypatch.setattr(Task, "validation", scripted_validation([2.0, 1.0, 3.0, of_average]))
    result = go(a_run(tmp_path / "run", save={"every": 4, "keep_last": 3, "average_last": 3}))
    kept = [
        load_file(CheckpointStore(tmp_path / "run/checkpoints").path(step) / "model.safetensors") for step in (4, 8, 12)
    ]
    final = load_file(tmp_path / "run/model/model.safetensors")
    if of_average < 1.0:
        assert result.chosen_weights == "the average of the last 3 checkpoints, better than those of step 8, the best"
        for name, value in final.items():
            torch.testing.assert_close(value, sum(one[name] for one in kept) / 3)
    else:
        said = "those of step 8, the best; the average of the last 3 checkpoints is not better (loss 1.5000)"
        assert result.chosen_weights == said
        assert all(torch.equal(value, kept[1][name]) for name, value in final.items())
    assert result.scores["loss"] == min(of_average, 1.0)


def test_a_run_that_stops_early_keeps_and_takes_its_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "validation", scripted_validation([2.0, 1.0, 1.5, 1.2, 9.0]))
    evaluate = {"every": 2, "patience": 2}
    result = go(a_run(tmp_path / "run", evaluate=evaluate, save={"every": 100, "keep_last": 1}))
    assert result.step == 8
    assert result.reason == "2 evaluations in a row without a better one (evaluate.patience 2)"
    assert result.chosen_weights == "those of step 4, the best"
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000008"]


def test_batches_without_targets_are_harmless() -> None:
    batch = CausalLMBatch(torch.full((1, 2), 5), torch.full((1, 2), -100))
    model = mf.build("transformer-lm", vocab=11, dim=8, depth=1, heads=1, max_length=8)
    engine = TrainingEngine(model, AdamWConfig(lr=0.1), DDPStrategy())
    assert engine.step([batch], 0.1).figures.isfinite().all()
    assert engine.non_finite_tensors() == []
