"""One process's part in a run, from its data to its final model."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from manyformer.config import RunConfig
from manyformer.models import Model
from manyformer.models.carried_state import has_memory
from manyformer.recipes import get_recipe
from manyformer.train.build_model import build_model, choose_device, choose_sharing, make_objective
from manyformer.train.checkpoint_writer import CheckpointWriter
from manyformer.train.checkpoints import Checkpoint, CheckpointStore
from manyformer.train.data_protocols import TrainingDataProtocol
from manyformer.train.durable_files import DiskFull, replace_text, room_for
from manyformer.train.engine import TrainingEngine
from manyformer.train.events import EventListener, TrainingFinished, TrainingNote, TrainingStarted
from manyformer.train.final_model import WeightChoice, choose, save_model
from manyformer.train.init_from import check_random_init, load_initial_weights
from manyformer.train.metrics import MetricsFiles, TensorBoardSink
from manyformer.train.model_card import model_card
from manyformer.train.process_group import ALONE, ProcessGroup
from manyformer.train.rng import seed_everything
from manyformer.train.run_folder import RESULT_FILE, write_environment, write_run_file
from manyformer.train.schedules import schedule
from manyformer.train.signals import StopSignal
from manyformer.train.train_state import ended
from manyformer.train.training_loop import LoopParts, MetricsSink, TrainingLoop
from manyformer.train.validation import Validator
from manyformer.training_hooks import uses_neighbours

DataOpener = Callable[[RunConfig, Path, Callable[[str], None]], TrainingDataProtocol]
"""Opens the data of a run; what it makes of it goes into the run's folder, what takes long is told."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run: its folder, last step, why it ended, which weights were chosen and their validation scores."""

    out: Path
    step: int
    why: str
    chosen: str
    scores: dict[str, float]

    def load(self) -> Model:
        """The final model."""
        from manyformer.api import load

        return load(self.out / "model")


class TrainingSession:
    """Opens what a run needs and carries it out."""

    def __init__(
        self,
        run: RunConfig,
        out: Path,
        tell: EventListener,
        wish: StopSignal,
        open_data: DataOpener,
        world: ProcessGroup = ALONE,
    ) -> None:
        self.run, self.out, self.tell, self.world = run, out, tell, world
        self.card = get_recipe(run.recipe).card
        device = choose_device(run.device, world)
        sharing = choose_sharing(run.strategy, world)
        self.store = CheckpointStore(out / "checkpoints", world)
        checkpoint = self.store.newest(lambda text: tell(TrainingNote(text)))
        with world.agreed():
            if world.first:
                write_run_file(out, run, begun=checkpoint is not None, tell=lambda text: tell(TrainingNote(text)))
                write_environment(out, device)
        with world.first_goes_ahead():
            self.data = open_data(run, out, lambda text: tell(TrainingNote(text)))
        seed_everything(run.seed)
        self.model = build_model(run, self.data)
        if checkpoint is None:
            self._begin(run.start)
        self.weights = sum(weight.numel() for weight in self.model.parameters())
        goes_on = self.data.train.goes_on
        self.engine = TrainingEngine(make_objective(run, self.model, device), run.optim, sharing, goes_on=goes_on)
        if world.rank:
            # equal weights, but dropout of one's own
            seed_everything(run.seed + 7919 * world.rank)
        self.judge = Validator(self.engine.scorer, self.data.valid, run.evaluate, world)
        self.loop = self._loop(checkpoint, wish)
        self._introduce(device)
        if checkpoint is not None:
            self.loop.resume(checkpoint)
            tell(TrainingNote(f"going on from step {checkpoint.step}"))

    def _begin(self, start: str | None) -> None:
        if start is None:
            check_random_init(self.model)
            return
        load_initial_weights(self.model, start, self.data)
        self.tell(TrainingNote(f"it begins with the weights of {start}"))

    def train(self) -> TrainResult:
        """Train to the end, choose the weights and save the model."""
        if (before := self._finished()) is not None:
            return before
        why = self._go()
        choice = self._choose()
        step = self.loop.standing.step
        result = TrainResult(self.out, step, why, choice.what, choice.scores)
        whole = self.engine.sharing.whole(self.model)
        with self.world.agreed(), room_for(f"the final model in {self.out}"):
            if self.world.first:
                save_model(whole, self.out / "model", extras=lambda folder: self._dress(folder, choice))
                found = {**asdict(result), "out": str(self.out), "save": self.run.save.model_dump()}
                replace_text(self.out / RESULT_FILE, json.dumps(found, indent=2) + "\n")
        return self._ended(result)

    def _ended(self, result: TrainResult) -> TrainResult:
        self.tell(TrainingFinished(result.step, result.why, result.chosen, result.scores, self.out, self._next()))
        return result

    def _finished(self) -> TrainResult | None:
        """What this run gave when it was finished earlier, where nothing is left to do."""
        file, standing = self.out / RESULT_FILE, self.loop.standing
        if not file.exists() or ended(self.run, standing) is None or not (self.out / "model").is_dir():
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["step"] != standing.step or found.pop("save") != self.run.save.model_dump():
            return None
        self.tell(TrainingNote("this run was finished before; its model is as it was"))
        return self._ended(TrainResult(**{**found, "out": self.out}))

    def _go(self) -> str:
        try:
            with ExitStack() as sinks:
                for sink in self.loop.parts.sinks:
                    sinks.callback(sink.close)
                return self.loop.go()
        except DiskFull as error:
            steps = self.store.steps()
            kept = f"; {self.store.path(steps[-1])} is whole" if steps else ""
            raise DiskFull(f"{error}{kept}. Free some space: the same command continues.") from error

    def _loop(self, checkpoint: Checkpoint | None, wish: StopSignal) -> TrainingLoop:
        run, feed, world = self.run, self.data.train, self.world
        if world.size > 1:
            feed = feed.shard(world.rank, world.size)
        parts = LoopParts(
            engine=self.engine,
            feed=feed,
            judge=self.judge,
            rate=schedule(run, width=self.model.spec.keywords.get("dim")),
            saver=CheckpointWriter(self.store, self.engine, feed, lambda text: self.tell(TrainingNote(text))),
            sinks=self._sinks(checkpoint) if world.first else (),
            tell=self.tell,
            stop_signal=wish,
        )
        return TrainingLoop(run, parts)

    def _sinks(self, checkpoint: Checkpoint | None) -> list[MetricsSink]:
        rows = 0 if checkpoint is None else int(checkpoint.state["standing"]["rows"])
        sinks: list[MetricsSink] = [MetricsFiles(self.out, rows=rows)]
        if "tensorboard" in self.run.track:
            sinks.append(TensorBoardSink(self.out, last=0 if checkpoint is None else checkpoint.step))
        return sinks

    def _introduce(self, device: torch.device) -> None:
        number = torch.get_num_threads()
        threads = f", {number} thread{'s' * (number > 1)}" if device.type == "cpu" else ""
        size, strategy = self.world.size, self.run.strategy
        together = f", {size} processes ({strategy})" if size > 1 else ""
        lines = (
            *(("data", line) for line in self.data.describe()),
            ("model", f"{self.model.spec.recipe}, {self.weights:,} parameters"),
            *self._remembers(),
            *self._looks_up(),
            ("device", f"{device}{threads}{together}, seed {self.run.seed}"),
            ("run", str(self.out)),
        )
        self.tell(TrainingStarted(lines, self.out))

    def _remembers(self) -> list[tuple[str, str]]:
        """What becomes of a model's memory, where it has one."""
        if not has_memory(self.model):
            return []
        if self.engine.memory.on:
            return [("memory", "goes on from batch to batch")]
        return [("memory", "always empty in training: rows of this data do not go on (data.packing=lanes does that)")]

    def _looks_up(self) -> list[tuple[str, str]]:
        """Where a model that looks things up has them from."""
        if not uses_neighbours(self.model):
            return []
        none = "none: nothing is looked up (data.neighbours names what `manyformer datastore neighbours` found)"
        return [("neighbours", str(getattr(self.run.data, "neighbours", None) or none))]

    def _choose(self) -> WeightChoice:
        standing, save = self.loop.standing, self.run.save
        last = WeightChoice(f"those of the last step, {standing.step}", standing.scores)
        best = None
        if save.best and (first := standing.ranking[0]).step != standing.step:
            folder = self.store.path(first.step)
            if folder.is_dir():
                best = folder, WeightChoice(f"those of step {first.step}, the best", first.scores)
        regular = [self.store.path(step) for step in self.loop.regular()]
        averaged = regular[-save.average :] if save.average else []
        return choose(self.engine, last=last, best=best, averaged=averaged, judge=self.judge)

    def _dress(self, folder: Path, choice: WeightChoice) -> None:
        """Tokenizers and a card beside the weights."""
        self.data.save(folder)
        step = self.loop.standing.step
        about = self.data.describe()
        text = model_card(
            self.run, self.card, self.model, data=about, chosen=choice.what, scores=choice.scores, step=step
        )
        (folder / "README.md").write_text(text, encoding="utf-8")

    def _next(self) -> tuple[str, ...]:
        """Commands that go on from here."""
        start = {"stdlib": "def ", None: "ab"}.get(getattr(self.run.data, "path", None), "The ")
        written = f'manyformer generate {self.out} "{start}"'
        use = {
            "language-model": (f"manyformer paint {self.out}" if self.run.data.kind == "images" else written,),
            "translation": (f'manyformer translate {self.out} "TEXT"',),
            "tagging": (f"manyformer tag {self.out} FILE.conllu",),
        }
        return (*use.get(self.card.task, ()), f"manyformer evaluate {self.out}", f"manyformer plot {self.out}")
