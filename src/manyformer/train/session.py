"""One process's part in a run, from its data to its final model."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from manyformer.config import Run
from manyformer.hooks import recalls
from manyformer.models import Model
from manyformer.models.carrying import has_memory
from manyformer.recipes import get
from manyformer.train.begin import begin_afresh, begin_with
from manyformer.train.build import build_model, choose_device, choose_sharing, make_objective
from manyformer.train.card import model_card
from manyformer.train.checkpoints import Checkpoint, Store
from manyformer.train.disk import DiskFull, replace_text, room_for
from manyformer.train.engine import Engine
from manyformer.train.evaluation import Judge
from manyformer.train.events import Finished, Listener, Note, Started
from manyformer.train.final import Choice, choose, save_model
from manyformer.train.folder import RESULT_FILE, claim, write_environment
from manyformer.train.loop import Loop, Parts, Sink
from manyformer.train.metrics import Metrics, TensorBoard
from manyformer.train.rng import seed_everything
from manyformer.train.saving import Saver
from manyformer.train.schedules import schedule
from manyformer.train.signals import Wish
from manyformer.train.source import Source
from manyformer.train.standing import ended
from manyformer.train.world import ALONE, World

Opener = Callable[[Run, Path, Callable[[str], None]], Source]
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
        from manyformer.face import load

        return load(self.out / "model")


class Session:
    """Opens what a run needs and carries it out."""

    def __init__(
        self, run: Run, out: Path, tell: Listener, wish: Wish, open_data: Opener, world: World = ALONE
    ) -> None:
        self.run, self.out, self.tell, self.world = run, out, tell, world
        self.card = get(run.recipe).card
        device = choose_device(run.device, world)
        sharing = choose_sharing(run.strategy, world)
        self.store = Store(out / "checkpoints", world)
        checkpoint = self.store.newest(lambda text: tell(Note(text)))
        with world.agreed():
            if world.first:
                claim(out, run, begun=checkpoint is not None, tell=lambda text: tell(Note(text)))
                write_environment(out, device)
        with world.first_goes_ahead():
            self.data = open_data(run, out, lambda text: tell(Note(text)))
        seed_everything(run.seed)
        self.model = build_model(run, self.data)
        if checkpoint is None:
            self._begin(run.start)
        self.weights = sum(weight.numel() for weight in self.model.parameters())
        goes_on = self.data.train.goes_on
        self.engine = Engine(make_objective(run, self.model, device), run.optim, sharing, goes_on=goes_on)
        if world.rank:
            # equal weights, but dropout of one's own
            seed_everything(run.seed + 7919 * world.rank)
        self.judge = Judge(self.engine.scorer, self.data.valid, run.evaluate, world)
        self.loop = self._loop(checkpoint, wish)
        self._introduce(device)
        if checkpoint is not None:
            self.loop.resume(checkpoint)
            tell(Note(f"going on from step {checkpoint.step}"))

    def _begin(self, start: str | None) -> None:
        if start is None:
            begin_afresh(self.model)
            return
        begin_with(self.model, start, self.data)
        self.tell(Note(f"it begins with the weights of {start}"))

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
        self.tell(Finished(result.step, result.why, result.chosen, result.scores, self.out, self._next()))
        return result

    def _finished(self) -> TrainResult | None:
        """What this run gave when it was finished earlier, where nothing is left to do."""
        file, standing = self.out / RESULT_FILE, self.loop.standing
        if not file.exists() or ended(self.run, standing) is None or not (self.out / "model").is_dir():
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["step"] != standing.step or found.pop("save") != self.run.save.model_dump():
            return None
        self.tell(Note("this run was finished before; its model is as it was"))
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

    def _loop(self, checkpoint: Checkpoint | None, wish: Wish) -> Loop:
        run, feed, world = self.run, self.data.train, self.world
        if world.size > 1:
            feed = feed.shard(world.rank, world.size)
        parts = Parts(
            engine=self.engine,
            feed=feed,
            judge=self.judge,
            rate=schedule(run, width=self.model.spec.keywords.get("dim")),
            saver=Saver(self.store, self.engine, feed, lambda text: self.tell(Note(text))),
            sinks=self._sinks(checkpoint) if world.first else (),
            tell=self.tell,
            wish=wish,
        )
        return Loop(run, parts)

    def _sinks(self, checkpoint: Checkpoint | None) -> list[Sink]:
        rows = 0 if checkpoint is None else int(checkpoint.state["standing"]["rows"])
        sinks: list[Sink] = [Metrics(self.out, rows=rows)]
        if "tensorboard" in self.run.track:
            sinks.append(TensorBoard(self.out, last=0 if checkpoint is None else checkpoint.step))
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
        self.tell(Started(lines, self.out))

    def _remembers(self) -> list[tuple[str, str]]:
        """What becomes of a model's memory, where it has one."""
        if not has_memory(self.model):
            return []
        if self.engine.memory.on:
            return [("memory", "goes on from batch to batch")]
        return [("memory", "always empty in training: rows of this data do not go on (data.packing=lanes does that)")]

    def _looks_up(self) -> list[tuple[str, str]]:
        """Where a model that looks things up has them from."""
        if not recalls(self.model):
            return []
        none = "none: nothing is looked up (data.neighbours names what `manyformer datastore neighbours` found)"
        return [("neighbours", str(getattr(self.run.data, "neighbours", None) or none))]

    def _choose(self) -> Choice:
        standing, save = self.loop.standing, self.run.save
        last = Choice(f"those of the last step, {standing.step}", standing.scores)
        best = None
        if save.best and (first := standing.ranking[0]).step != standing.step:
            folder = self.store.path(first.step)
            if folder.is_dir():
                best = folder, Choice(f"those of step {first.step}, the best", first.scores)
        regular = [self.store.path(step) for step in self.loop.regular()]
        averaged = regular[-save.average :] if save.average else []
        return choose(self.engine, last=last, best=best, averaged=averaged, judge=self.judge)

    def _dress(self, folder: Path, choice: Choice) -> None:
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
