"""What people see: a bar on a terminal, plain lines elsewhere, and the files of a run."""

import csv
import io
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fakes import a_run
from runs import Heard, go, learned, stopped

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.config import differences
from manyformer.training.events import (
    CheckpointSaved,
    LiveReporter,
    TrainingEvent,
    TrainingFinished,
    TrainingNote,
    TrainingProgress,
    TrainingStarted,
    TrainingValidated,
    TrainResult,
    format_duration,
    format_event,
    log_file_reporter,
    reporter,
)
from manyformer.training.launch import WorkerFailure, decode, encode
from manyformer.training.metrics import stored_id
from manyformer.training.run_folder import as_run, check_run_folder

OUT = Path("runs/x")
EVENTS: list[TrainingEvent] = [
    TrainingStarted((("data", "a rule"), ("model", "transformer-lm, 12 parameters")), OUT),
    TrainingProgress(10, 100, 2.34567, 0.00123, 1234.5, 0.1, 65.0, logged=True),
    TrainingProgress(11, 100, 2.3, 0.00123, 1234.5, 0.11, 65.0, logged=False),
    TrainingValidated(20, {"loss": 1.5, "accuracy": 0.25}, best=True, seconds=0.5),
    CheckpointSaved(20, OUT / "checkpoints/step-00000020"),
    TrainingNote("a [bold] sentence"),
    TrainingFinished(
        TrainResult(OUT, 100, "limits.steps 100 reached", "those of the last step, 100", {"loss": 1.5}), ("one", "two")
    ),
]
PLAIN = """\
data     a rule
model    transformer-lm, 12 parameters
step     10/100  loss 2.3457  lr 0.00123  1234 tokens/s  left 1:05
valid    step 20  loss 1.5000 nats  accuracy 0.2500 (best)
note     a [bold] sentence
done     step 100: limits.steps 100 reached
model    those of the last step, 100  loss 1.5000 nats  → runs/x/model
next     one
         two
"""


def test_scores_of_the_training_data_take_the_place_of_the_loss() -> None:
    scores = {"return": 0.51239, "episode_length": 61.0}
    event = TrainingProgress(10, 100, 2.34567, 0.00123, 1234.5, 0.1, 65.0, logged=True, scores=scores)
    (line,) = format_event(event)
    assert line == "step     10/100  return 0.5124  episode length 61  lr 0.00123  1234 tokens/s  left 1:05"
    assert decode(encode(event)) == event


def test_a_run_that_waits_for_data_says_so() -> None:
    def line(data_wait: float) -> str:
        event = TrainingProgress(10, 100, 2.34567, 0.00123, 1234.5, 0.1, 65.0, logged=True, data_wait=data_wait)
        assert decode(encode(event)) == event
        return format_event(event)[0]

    usual = "step     10/100  loss 2.3457  lr 0.00123  1234 tokens/s  left 1:05"
    assert line(0.099) == usual
    assert line(0.354) == usual.replace("tokens/s", "tokens/s  data wait 35%")


def test_plain_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    tell = reporter(stream)
    assert not isinstance(tell, LiveReporter)
    log = log_file_reporter(tmp_path / "log.txt")
    for event in EVENTS:
        tell(event)
        log(event)
    assert stream.getvalue() == (tmp_path / "log.txt").read_text() == PLAIN


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    tell = reporter(stream)
    assert isinstance(tell, LiveReporter)
    for event in EVENTS:
        tell(event)
    text = stream.getvalue()
    for line in PLAIN.splitlines():
        if not line.startswith("step"):
            assert line in text
    # the last state of the bar, and no line of its own for each step
    assert "11/100  loss 2.3000" in text
    tell.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3601, "1:00:01"), (float("nan"), "?"), (float("inf"), "?")]
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_travel_between_processes(event: TrainingEvent) -> None:
    assert decode(encode(event)) == event


def test_mistakes_travel_between_processes() -> None:
    from manyformer.training import DiskFull

    for error in (UserError("a"), DiskFull("the disk is full")):
        failure = decode(encode(WorkerFailure.of(error)))
        assert isinstance(failure, WorkerFailure)
        back = failure.as_error("process 1 of 2")
        assert type(back) is type(error)
        assert str(back) == str(error)


def test_a_defect_travels_with_its_traceback() -> None:
    try:
        {}["lost"]
    except KeyError as error:
        failure = decode(encode(WorkerFailure.of(error)))
    assert isinstance(failure, WorkerFailure)
    back = failure.as_error("process 1 of 2")
    assert isinstance(back, RuntimeError)
    assert str(back) == "process 1 of 2: KeyError: 'lost'"
    assert '{}["lost"]' in str(back.__cause__)


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", trackers=["tensorboard"])
    heard = Heard()
    go(run, heard)
    out = tmp_path / "run"
    assert not differences(as_run(out / "run.yaml"), run)
    assert yaml.safe_load((out / "run.yaml").read_text())["optim"]["weight_decay"] == 0.1
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    with (out / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [{k: v for k, v in row.items() if v} for row in table] == [
        {k: str(v) for k, v in row.items()} for row in rows
    ]
    assert [row["step"] for row in rows if "valid_loss" in row] == [4, 8, 12]
    assert json.loads((out / "env.json").read_text())["device"] == "cpu"
    assert list((out / "tensorboard").iterdir())
    card = (out / "model/README.md").read_text()
    for part in ("a rule, made up", "parameters", "| loss |", "seed 0"):
        assert part in card
    assert mf.load(out).tokenizer is not None
    started, finished = heard[0], heard[-1]
    assert isinstance(started, TrainingStarted)
    assert isinstance(finished, TrainingFinished)
    assert [subject for subject, _ in started.summary_lines] == ["data", "model", "device", "run"]
    assert [line.split()[1] for line in finished.next_commands] == ["generate", "view", "evaluate"]
    result = json.loads((out / "result.json").read_text())
    assert result["scores"] == finished.result.scores


@pytest.mark.parametrize(
    ("tracker", "module", "extra"),
    [("tensorboard", "torch.utils.tensorboard", "track"), ("wandb", "wandb", "wandb"), ("mlflow", "mlflow", "mlflow")],
)
def test_trackers_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, module: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf'{tracker} needs one more library: pip install "manyformer\[{extra}\]"'):
        go(a_run(tmp_path / "run", trackers=[tracker]))


def losses(out: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row.get("loss") is not None}


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB behind a header of 7 bytes: checksum, length and type of each part, in blocks."""
    start, parts = 7, b""
    while start + 7 <= len(content):
        if 0 < -start % 32_768 < 7:
            start += -start % 32_768
            continue
        _, length, kind = struct.unpack("<IHB", content[start : start + 7])
        parts += content[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'manyformer[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("WANDB_MODE", raising=False)
    out = tmp_path / "run"
    stopped(a_run(out, trackers=["wandb"]), 5)
    go(a_run(out, trackers=["wandb"]))
    wandb.teardown()
    files = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{(out / 'wandb.id').read_text().strip()}"}
    logged: dict[int, float] = {}
    for file in files:
        for data in leveldb_records(file.read_bytes()):
            record = Record.FromString(data)
            items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
            if "train/loss" in items:
                logged[int(items["_step"])] = float(items["train/loss"])
    assert logged == losses(out)


def test_mlflow_in_a_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is missing: pip install 'manyformer[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out = tmp_path / "run"
    stopped(a_run(out, trackers=["mlflow"]), 5)
    go(a_run(out, trackers=["mlflow"]))
    client = tracking.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("manyformer").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["optim.weight_decay"] == "0.1"
    assert {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")} == losses(
        out
    )
    (out / "mlflow.id").write_text("../store")
    with pytest.raises(DamagedFile, match=r"mlflow\.id is damaged"):
        stored_id(out / "mlflow.id", str)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"contains thesis\.tex but no run\.yaml"):
        check_run_folder(tmp_path)
    check_run_folder(tmp_path / "new")


def test_metrics_without_a_last_line_end(tmp_path: Path) -> None:
    go(a_run(tmp_path / "whole"))
    run = a_run(tmp_path / "run")
    stopped(run, 5)
    with (tmp_path / "run/metrics.jsonl").open("rb+") as file:
        file.truncate(file.seek(0, 2) - 1)
    go(run)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")


def test_overrides_belong_to_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="overrides go with"):
        mf.train(a_run(tmp_path), ["depth=3"])
    with pytest.raises(UserError, match="transformer-lm"):
        mf.train("transformer-ml", [f"out={tmp_path}"])
