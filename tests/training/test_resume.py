"""An interruption changes nothing: every number of the metrics and every bit of the weights is as without it."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeFeed, FakeHeld, FakeSource, a_run, opener
from runs import Heard, go, learned, stopped
from torch import nn

from manyformer.base.errors import TrainingInterrupted, UserError
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.base.system import StopSignal
from manyformer.config import RunConfig
from manyformer.nn.batches import Batch, CausalLMBatch
from manyformer.training.events import TrainingFinished

SETTINGS: dict[str, Any] = {
    "limits": {"steps": 11},
    "evaluate": {"every": 3},
    "save": {"every": 4, "keep_last": 2, "average_last": 2},
    "batch": {"accumulate": 2},
    "log": {"every": 2},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(a_run(out, **SETTINGS))
    return out


def same(out: Path, whole: Path) -> None:
    assert learned(out) == learned(whole)
    assert (out / "metrics.csv").read_text().count("\n") == (whole / "metrics.csv").read_text().count("\n")
    assert (out / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == sorted(
        p.name for p in (whole / "checkpoints").iterdir()
    )


def test_stopped_in_the_last_evaluation(tmp_path: Path) -> None:
    settings = {**SETTINGS, "limits": {"steps": 6}, "evaluate": {"every": None}}
    go(a_run(tmp_path / "whole", **settings))
    run = a_run(tmp_path / "run", **settings)
    assert stopped(run, 6) == "stopped at step 6, saved. The same command continues."
    # the second time nothing is left to do, and the rows of the checkpoint are those of the metrics
    for _ in range(2):
        go(run)
        same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("step", [2, 4, 6, 7, 9, 10])
def test_stopped_between_steps(step: int, tmp_path: Path, whole: Path) -> None:
    run = a_run(tmp_path / "run", **SETTINGS)
    said = stopped_at(run, step)
    assert said == f"stopped at step {step}, saved. The same command continues."
    go(run)
    same(tmp_path / "run", whole)


def test_layers_ahead_go_on_as_they_were(tmp_path: Path) -> None:
    """Their weights are in checkpoints, and their dropout draws the same numbers."""
    model = {"dim": 16, "depth": 2, "heads": 2, "dropout": 0.1, "ahead": "sequential", "ahead_tokens": 2}
    settings = {**SETTINGS, "limits": {"steps": 6}, "model": model}
    go(a_run(tmp_path / "whole", **settings))
    run = a_run(tmp_path / "run", **settings)
    stopped(run, 3)
    go(run)
    same(tmp_path / "run", tmp_path / "whole")


def stopped_at(run: RunConfig, step: int) -> str:
    """Asked to stop while the batches of that step are fetched."""
    wish, source = StopSignal(), FakeSource("language-model")

    class Asking(FakeFeed):
        fetched = 0

        def __next__(self) -> Batch:
            self.fetched += 1
            if self.fetched == 2 * step:
                wish.signal_name = "SIGTERM"
            return super().__next__()

    source.train = Asking("language-model")
    with pytest.raises(TrainingInterrupted) as stop:
        go(run, wish=wish, opened=lambda *_: source)
    return str(stop.value)


class NoisyFeed(FakeFeed):
    """A feed that depends on the model and on a number which its position does not say."""

    score_names = ("noise",)
    draws = 0.0

    def attach(self, model: nn.Module) -> None:
        self.weight = next(model.parameters())

    def __next__(self) -> Batch:
        batch = super().__next__()
        self.draws += float(self.weight.detach().sum())
        assert isinstance(batch, CausalLMBatch)
        return batch._replace(tokens=batch.tokens.roll(int(100 * self.draws) % 8, 1))

    def write_files(self, folder: Path) -> None:
        (folder / "draws.txt").write_text(self.draws.hex())

    def read_files(self, files: VerifiedFolder) -> None:
        self.draws = float.fromhex(files.file("draws.txt").read_text())

    def training_scores(self) -> dict[str, float]:
        return {"noise": self.draws}


def noisy(*_: Any) -> FakeSource:
    source = FakeSource("language-model")
    source.train = NoisyFeed("language-model")
    return source


def test_a_feed_that_depends_on_the_model_has_files_in_the_checkpoint(tmp_path: Path) -> None:
    go(a_run(tmp_path / "whole", **SETTINGS), opened=noisy)
    run = a_run(tmp_path / "run", **SETTINGS)
    for step in (2, 8):
        stopped(run, step, opened=noisy)
    go(run, opened=noisy)
    same(tmp_path / "run", tmp_path / "whole")
    assert len({row["noise"] for row in learned(tmp_path / "run") if "noise" in row}) == 5


def test_stopped_again_and_again(tmp_path: Path, whole: Path) -> None:
    run = a_run(tmp_path / "run", **SETTINGS)
    for step in (2, 4, 6, 8, 10):
        stopped(run, step)
    go(run)
    same(tmp_path / "run", whole)


def test_features_that_are_drawn_anew_are_drawn_alike(tmp_path: Path) -> None:
    words = {"dim": 16, "depth": 1, "heads": 2, "features": 6, "redraw": 3}
    settings = SETTINGS | {"model": words, "limits": {"steps": 8}, "save": {"every": 4}}
    go(a_run(tmp_path / "whole", "performer", **settings))
    run = a_run(tmp_path / "run", "performer", **settings)
    for step in (2, 6):
        stopped(run, step)
    go(run)
    same(tmp_path / "run", tmp_path / "whole")
    go(a_run(tmp_path / "never", "performer", **settings | {"model": words | {"redraw": None}}))
    never, drawn = (learned(tmp_path / name) for name in ("never", "whole"))
    assert never[0] == drawn[0]
    assert never[-1] != drawn[-1]


def test_stopped_while_evaluating(tmp_path: Path, whole: Path) -> None:
    run, wish = a_run(tmp_path / "run", **SETTINGS), StopSignal()

    class Asking(FakeHeld):
        passes = 0

        def __iter__(self) -> Iterator[Batch]:
            Asking.passes += 1
            for number, batch in enumerate(super().__iter__()):
                if Asking.passes == 2 and number == 0:
                    wish.signal_name = "SIGINT"
                yield batch

    source = FakeSource("language-model")
    source.valid = Asking("language-model")
    with pytest.raises(TrainingInterrupted, match="stopped at step 6"):
        go(run, wish=wish, opened=lambda *_: source)
    go(run)
    same(tmp_path / "run", whole)


def test_killed_after_rows_were_written(tmp_path: Path, whole: Path) -> None:
    run = a_run(tmp_path / "run", **SETTINGS)
    stopped(run, 8)
    # as if killed at step 8, before the checkpoint: rows of steps that will be made again, the last one cut
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000008")
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    go(run)
    same(tmp_path / "run", whole)


def test_a_finished_run_is_finished(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", **SETTINGS)
    first = go(run)
    before = learned(tmp_path / "run")
    weights = (tmp_path / "run/model/model.safetensors").read_bytes()
    heard = Heard()
    assert go(run, heard) == first
    assert "already finished" in heard.notes
    assert isinstance(heard[-1], TrainingFinished)
    # another way to choose the final weights is worth another look
    again = go(run.model_copy(update={"save": run.save.model_copy(update={"average_last": 0})}))
    assert "average" not in again.chosen_weights
    go(run)
    assert learned(tmp_path / "run") == before
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == weights


def test_changed_settings_are_listed_and_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", **SETTINGS)
    stopped(run, 4)
    other = a_run(tmp_path / "run", **SETTINGS, seed=7, loss={"label_smoothing": 0.1})
    with pytest.raises(UserError) as refused:
        go(other)
    assert "seed: 0, now 7" in str(refused.value)
    assert "loss.label_smoothing: 0.0, now 0.1" in str(refused.value)
    go(run)


def test_settings_may_change_before_the_first_checkpoint(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", **SETTINGS)

    def fail(step: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go(run, Heard(fail))
    go(a_run(tmp_path / "run", **SETTINGS, seed=7))


def test_a_longer_run_goes_on(tmp_path: Path) -> None:
    constant = {**SETTINGS, "schedule": {"name": "constant", "warmup": 2}, "save": {"every": 4}}
    go(a_run(tmp_path / "short", **constant))
    heard = Heard()
    go(a_run(tmp_path / "short", **{**constant, "limits": {"steps": 16}}), heard)
    assert "limits have changed" not in heard.notes
    go(a_run(tmp_path / "long", **{**constant, "limits": {"steps": 16}}))
    losses = [
        [(row["step"], row["loss"]) for row in learned(tmp_path / name) if "loss" in row] for name in ("short", "long")
    ]
    assert losses[0] == losses[1]


def test_a_cosine_that_gets_another_end_says_what_the_rate_does(tmp_path: Path) -> None:
    """A finished cosine begins to fall again from high above; the numbers are those of the rows of metrics."""
    cosine = {**SETTINGS, "schedule": {"name": "cosine", "warmup": 2, "final_ratio": 0.1}, "save": {"every": 4}}
    cosine |= {"log": {"every": 1}}
    short = a_run(tmp_path / "run", **cosine)
    go(short)
    last = short.limits.steps
    assert last is not None
    heard = Heard()
    go(a_run(tmp_path / "run", **{**cosine, "limits": {"steps": 4 * last}}), heard)
    peak = short.optim.lr
    assert peak is not None
    progress = (last + 1 - 2) / (4 * last - 2)
    expected = peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
    assert f"the learning rate rises from {0.1 * peak:.3g} to {expected:.3g} at step {last + 1}" in heard.notes
    rows = {row["step"]: row["learning_rate"] for row in learned(tmp_path / "run") if "learning_rate" in row}
    assert rows[last + 1] == pytest.approx(expected)


def test_a_cosine_that_ends_earlier_says_so(tmp_path: Path) -> None:
    stopped(a_run(tmp_path / "run", **SETTINGS), 4)
    heard = Heard()
    go(a_run(tmp_path / "run", **{**SETTINGS, "limits": {"steps": 6}}), heard)
    assert "the limits have changed" in heard.notes
    assert "the learning rate falls from" in heard.notes


def test_resumed_says_so(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", **SETTINGS)
    stopped(run, 6)
    heard = Heard()
    go(run, heard, opened=opener)
    assert "resuming from step 6" in heard.notes


def test_a_run_that_was_moved_says_so(tmp_path: Path, whole: Path) -> None:
    stopped(a_run(tmp_path / "here", **SETTINGS), 6)
    (tmp_path / "here").rename(tmp_path / "there")
    heard = Heard()
    go(a_run(tmp_path / "there", **SETTINGS), heard)
    assert f"this run was in {tmp_path / 'here'} and is now in {tmp_path / 'there'}" in heard.notes
    same(tmp_path / "there", whole)


def test_a_run_whose_folder_was_not_recorded_says_nothing_of_it(tmp_path: Path) -> None:
    """As in versions up to 0.2.0."""
    stopped(a_run(tmp_path / "run", **SETTINGS), 6)
    environment = json.loads((tmp_path / "run/env.json").read_text())
    del environment["folder"]
    (tmp_path / "run/env.json").write_text(json.dumps(environment))
    heard = Heard()
    go(a_run(tmp_path / "run", **SETTINGS), heard)
    assert "is now in" not in heard.notes
