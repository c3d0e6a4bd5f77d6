"""Batches that are read ahead: the same ones, from the position of the one trained on, whatever interrupts a run."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeFeed, FakeHeld, FakeSource, a_run, make
from runs import Heard, go, learned, stopped

from manyformer.base.errors import TrainingInterrupted, UserError
from manyformer.base.system import StopSignal
from manyformer.config import RunConfig
from manyformer.data.batching.epochs import TrainingFeed
from manyformer.models.embedding import positions_of
from manyformer.nn.batches import Batch, to_device
from manyformer.training import ahead_feed
from manyformer.training.ahead_feed import AheadFeed, DeviceCopies, PreparedBatch, batches_ahead, pass_reader
from manyformer.training.events import TrainingProgress

CPU, GPU = torch.device("cpu"), torch.device("cuda")
AHEAD = 3
SETTINGS: dict[str, Any] = {
    "limits": {"steps": 11},
    "evaluate": {"every": 3},
    "save": {"every": 4, "keep_last": 2, "average_last": 2},
    "log": {"every": 2},
}


class SteadyFeed(FakeFeed):
    """Batches that their position alone decides; counts how many were read."""

    reads_ahead = True  # type: ignore[assignment]
    read = 0

    def __next__(self) -> Batch:
        self.read += 1
        return super().__next__()

    def shard(self, rank: int, world_size: int) -> "SteadyFeed":
        return SteadyFeed(self.task, rank, world_size)


def steady(*_: Any) -> FakeSource:
    source = FakeSource("language-model")
    source.train = SteadyFeed("language-model")
    return source


def counted(batch: Batch) -> PreparedBatch:
    return PreparedBatch(batch, batch.target_count(), batch.token_count())


def ahead_of(feed: TrainingFeed, ahead: int = AHEAD) -> AheadFeed:
    return AheadFeed(feed, ahead, counted)


def is_equal(batch: Any, expected: Any) -> bool:
    return type(batch) is type(expected) and all(
        (part is None) == (expected_part is None) and (part is None or torch.equal(part, expected_part))
        for part, expected_part in zip(batch, expected, strict=True)
    )


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "batches ahead"]


def training(out: Path, *, ahead: int | str = AHEAD, **settings: Any) -> RunConfig:
    return a_run(out, **{**SETTINGS, "batch": {"accumulate": 2, "ahead": ahead}, **settings})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that reads nothing ahead and that nobody interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(training(out, ahead=0), opened=steady)
    return out


def assert_same_run(out: Path, whole: Path) -> None:
    assert learned(out) == learned(whole)
    assert (out / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()


def test_batches_and_positions_are_those_of_the_feed_itself() -> None:
    expected, feed = FakeFeed("translation"), ahead_of(SteadyFeed("translation"))
    assert (feed.epoch, feed.batch, feed.batches) == (0, 0, 5)
    for _ in range(13):
        batch, prepared = next(expected), next(feed)
        assert is_equal(prepared.batch, batch)
        assert (prepared.targets, prepared.tokens) == (batch.target_count(), batch.token_count())
        assert (feed.epoch, feed.batch, feed.batches) == (expected.epoch, expected.batch, expected.batches)
        assert feed.state_dict() == expected.state_dict()
    feed.close()


@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7])
def test_a_saved_position_is_that_of_the_batch_taken_last(taken: int) -> None:
    feed = ahead_of(SteadyFeed("language-model"))
    for _ in range(taken):
        next(feed)
    state = feed.state_dict()
    following = [next(feed).batch for _ in range(6)]
    feed.load_state_dict(state)
    assert feed.state_dict() == state
    assert all(is_equal(next(feed).batch, batch) for batch in following)
    plain = FakeFeed("language-model")
    plain.load_state_dict(state)
    assert all(is_equal(next(plain), batch) for batch in following)
    feed.close()


def test_what_was_read_ahead_is_forgotten_at_close_and_read_again() -> None:
    inner, plain = SteadyFeed("language-model"), FakeFeed("language-model")
    feed = ahead_of(inner)
    for _ in range(4):
        assert is_equal(next(feed).batch, next(plain))
        feed.close()
    # each of the four was read with up to three more
    assert 4 < inner.read <= 16
    assert feed.state_dict() == plain.state_dict()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_of_the_rows_goes_on_at_the_same_position(rank: int) -> None:
    feed, plain = ahead_of(SteadyFeed("language-model")), FakeFeed("language-model", rank, 2)
    for _ in range(3):
        next(feed), next(plain)
    share = feed.shard(rank, 2)
    share.load_state_dict(feed.state_dict())
    assert all(is_equal(next(share).batch, next(plain)) for _ in range(4))
    share.close()


def test_a_run_that_reads_ahead_learns_the_same(tmp_path: Path, whole: Path) -> None:
    go(training(tmp_path / "run"), opened=steady)
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("step", [1, 2, 4, 5, 9, 10])
def test_an_interrupted_run_goes_on_from_the_batch_trained_on(step: int, tmp_path: Path, whole: Path) -> None:
    run = training(tmp_path / "run", log={"every": 1} if step % 2 else {"every": 2})
    if step % 2:
        # a step that is no multiple of log.every is reported where all are logged, so the reference logs all too
        go(training(tmp_path / "all", ahead=0, log={"every": 1}), opened=steady)
        whole = tmp_path / "all"
    assert stopped(run, step, opened=steady) == f"stopped at step {step}, saved. The same command continues."
    # how much is read ahead may change where a run goes on
    go(run.model_copy(update={"batch": run.batch.model_copy(update={"ahead": step % 3})}), opened=steady)
    assert_same_run(tmp_path / "run", whole)


def test_what_is_wrong_with_the_data_is_told_after_the_steps_before_it(tmp_path: Path) -> None:
    class BrokenFeed(SteadyFeed):
        def __next__(self) -> Batch:
            if self.epoch == 1 and self.batch == 2:
                raise UserError("photos/7.png is damaged; replace it")
            return super().__next__()

    def broken(*_: Any) -> FakeSource:
        source = FakeSource("language-model")
        source.train = BrokenFeed("language-model")
        return source

    def lines(ahead: int) -> list[dict[str, Any]]:
        out = tmp_path / str(ahead)
        with pytest.raises(UserError, match=r"^photos/7\.png is damaged; replace it$"):
            go(a_run(out, batch={"ahead": ahead}), opened=broken)
        return learned(out)

    assert len([row for row in lines(0) if "loss" in row]) == 7
    assert lines(AHEAD) == learned(tmp_path / "0")


def test_an_impatient_user_leaves_no_thread(tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(training(tmp_path / "run"), Heard(interrupt), opened=steady)


def test_a_stop_in_an_evaluation_leaves_no_thread(tmp_path: Path) -> None:
    wish = StopSignal()
    with pytest.raises(TrainingInterrupted):
        go(
            training(tmp_path / "run"),
            Heard(lambda step: setattr(wish, "signal_name", "SIGTERM")),
            wish=wish,
            opened=steady,
        )


def test_a_pass_over_held_out_batches_reads_ahead_and_ends() -> None:
    begun: list[int] = []
    closed: list[bool] = []

    def held_out() -> Iterator[Batch]:
        try:
            for seed in range(6):
                begun.append(seed)
                yield make("language-model", seed)
        finally:
            closed.append(True)

    read = pass_reader(2, counted)
    with read(held_out()) as batches:
        assert all(
            is_equal(batch.batch, make("language-model", seed))  # type: ignore[attr-defined]
            for seed, batch in enumerate(batches)
        )
    assert begun == list(range(6))
    # one that ends early closes the source, having read no more than two batches ahead
    begun.clear()
    with read(held_out()) as batches:
        next(batches)
    assert len(begun) <= 3
    assert closed == [True, True]


def test_what_is_wrong_with_held_out_data_is_told(tmp_path: Path) -> None:
    class BrokenHeld(FakeHeld):
        def __iter__(self) -> Iterator[Batch]:
            yield make(self.task, 1000)
            raise UserError("valid.txt:7 is no text")

    def broken(*_: Any) -> FakeSource:
        source = steady()
        source.valid = BrokenHeld("language-model")
        return source

    with pytest.raises(UserError, match=r"^valid\.txt:7 is no text$"):
        go(training(tmp_path / "run"), opened=broken)


def test_a_gpu_waits_for_the_copy_and_the_host_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls; CUDA is not there."""
    calls: list[Any] = []

    class FakeStream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            calls.append((self.name, "waits for", event.recorded_by))

    class FakeEvent:
        recorded_by = ""

        def record(self, stream: FakeStream) -> None:
            self.recorded_by = stream.name

    @contextmanager
    def within(stream: FakeStream) -> Iterator[None]:
        calls.append((stream.name, "begins"))
        yield
        calls.append((stream.name, "ends"))

    def move(batch: Batch, device: torch.device) -> Batch:
        calls.append(("copied to", device.type))
        return batch

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("copies"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream("computation"))
    monkeypatch.setattr(ahead_feed, "to_device", move)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: calls.append((stream.name, "uses")))
    batch = make("language-model", 0)
    prepared = DeviceCopies(GPU)(counted(batch))
    assert calls == [("copies", "begins"), ("copied to", "cuda"), ("copies", "ends")]
    calls.clear()
    assert is_equal(prepared.on_device(GPU), batch)
    # tokens and targets
    assert calls == [("computation", "waits for", "copies"), *[("computation", "uses")] * 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_reach_a_gpu_whole_while_it_computes() -> None:
    busy = torch.randn(2000, 2000, device=GPU)
    feed, plain, copies = SteadyFeed("language-model"), FakeFeed("language-model"), DeviceCopies(GPU)
    ahead = AheadFeed(feed, AHEAD, lambda batch: copies(counted(batch)))
    sums = []
    for _ in range(50):
        busy = torch.mm(busy, busy).clamp(-1, 1)
        arrived: Any = next(ahead).on_device(GPU)
        sums.append((arrived.tokens * torch.arange(8, device=GPU)).sum())
    ahead.close()
    assert [int(total) for total in sums] == [
        int((next(plain).tokens * torch.arange(8)).sum())  # type: ignore[attr-defined]
        for _ in range(50)
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu_learns_the_same_ahead(tmp_path: Path) -> None:
    for name, ahead in (("none", 0), ("ahead", AHEAD)):
        run = training(tmp_path / name, ahead=ahead, device="cuda", compile="off", precision="float32")
        go(run, opened=steady)
    for row, expected in zip(learned(tmp_path / "ahead"), learned(tmp_path / "none"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


def test_a_run_reads_ahead_on_a_gpu_unless_its_weights_make_the_batches() -> None:
    steady_feed, acting = SteadyFeed("language-model"), FakeFeed("language-model")
    assert batches_ahead("auto", steady_feed, CPU) == 0
    assert batches_ahead("auto", steady_feed, GPU) == 2
    assert batches_ahead("auto", acting, GPU) == 0
    assert batches_ahead(0, acting, CPU) == 0
    assert [batches_ahead(5, steady_feed, device) for device in (CPU, GPU)] == [5, 5]
    with pytest.raises(UserError, match=r"batch\.ahead is 5, but this data gives a batch only in its turn"):
        batches_ahead(5, acting, CPU)


@pytest.mark.parametrize("value", [-1, 65, 1.5, "two", True])
def test_numbers_that_are_none_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a number of batches up to 64, or auto"):
        a_run(tmp_path, batch={"ahead": value})


@pytest.mark.parametrize(("ahead", "is_refused"), [(2, True), (0, False), ("auto", False)])
def test_the_batches_of_a_policy_are_not_read_before_their_turn(ahead: int | str, is_refused: bool) -> None:
    run = {"recipe": "gtrxl", "data": {"kind": "environment"}, "batch": {"ahead": ahead}}
    if not is_refused:
        assert RunConfig.model_validate(run).batch.ahead == ahead
        return
    with pytest.raises(ValueError, match="must be auto or 0: what a policy does depends on its weights"):
        RunConfig.model_validate(run)


def test_what_is_known_of_segments_goes_with_them_to_a_device() -> None:
    feed = SteadyFeed("language-model")
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, -1, -1]] * 2)

    def with_segments(batch: Batch) -> PreparedBatch:
        return DeviceCopies(torch.device("meta"))(counted(batch._replace(segments=segments)))  # type: ignore[attr-defined]

    ahead = AheadFeed(feed, 2, with_segments)
    # tensors on the meta device hold no numbers: what is known of them was read before
    arrived: Any = next(ahead).on_device(torch.device("meta"))
    assert arrived.tokens.is_meta
    layout = positions_of(arrived.tokens, arrived.segments, None, arrived.layout)[0].layout
    assert layout == positions_of(segments, segments, None)[0].layout
    assert layout is not None
    assert positions_of(arrived.tokens, segments.to("meta"), None)[0].layout is None
    ahead.close()


def test_tensors_that_are_on_the_device_stay() -> None:
    meta = torch.device("meta")
    batch: Any = to_device(next(FakeFeed("language-model")), meta)
    assert to_device(batch, meta).tokens is batch.tokens


def test_the_metrics_tell_how_long_a_run_waits_for_data(tmp_path: Path) -> None:
    class SlowFeed(SteadyFeed):
        def __next__(self) -> Batch:
            time.sleep(0.05)
            return super().__next__()

    def slow(*_: Any) -> FakeSource:
        source = FakeSource("language-model")
        source.train = SlowFeed("language-model")
        return source

    heard = Heard()
    go(a_run(tmp_path / "run", limits={"steps": 4}), heard, opened=slow)
    shares = [event.data_wait for event in heard if isinstance(event, TrainingProgress)]
    assert len(shares) == 4
    assert all(0 < share <= 1 for share in shares)
