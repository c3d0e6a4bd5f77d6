"""`manyformer.train`: a run, given by name, file or configuration, is trained to its final model.

`train` starts the processes, each of which is one `TrainingSession` from the data to the final model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import DiskFull, NotWritable, atomic_write_text, report_disk_full
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.base.system import StopSignal, handle_stop_signals, resumable
from manyformer.base.type_aliases import LogFn
from manyformer.config import RUN_FILE, GivenData, RunConfig, dump_run
from manyformer.conversion.surgery.lora import merge_lora
from manyformer.data.pipeline.opened import OpenedData
from manyformer.models import Model
from manyformer.models.model_files import GENERATION_FILE, GenerationSettings, read_spec, replacement_folder
from manyformer.models.scores import is_comparable
from manyformer.nn.attention.head_gates import GATES_FILE, attach_gates, fold_gates
from manyformer.nn.batches import Batch
from manyformer.nn.runtime.devices import OutOfMemory, report_out_of_memory, use_device
from manyformer.nn.runtime.training_hooks import uses_neighbours
from manyformer.recipes import get_recipe
from manyformer.recipes.parts.own_modules import LossFn
from manyformer.training.ahead_feed import (
    AheadFeed,
    DeviceCopies,
    PassReader,
    PreparedBatch,
    batches_ahead,
    pass_reader,
)
from manyformer.training.build_model import (
    adapt_model,
    build_model,
    choose_device,
    choose_strategy,
    make_engine,
    open_run_data,
)
from manyformer.training.checkpoints import Checkpoint, CheckpointStore, CheckpointWriter, find_branch
from manyformer.training.events import (
    EventListener,
    LiveReporter,
    TrainingFinished,
    TrainingNote,
    TrainingStarted,
    TrainResult,
    broadcast,
    log_file_reporter,
    reporter,
    silent,
)
from manyformer.training.given_training import GivenTraining, ModelSource
from manyformer.training.init_from import check_random_init, load_initial_weights, transfer_from
from manyformer.training.metrics import MetricsFiles, MetricsSink, open_trackers
from manyformer.training.process_group import (
    SINGLE_PROCESS_GROUP,
    ProcessGroup,
    initialized_process_group,
    name_lost_process,
    process_group_from_environment,
)
from manyformer.training.process_state import deterministic_algorithms, seed_everything
from manyformer.training.run_checks import check_before_data
from manyformer.training.run_folder import (
    RESULT_FILE,
    as_training_run,
    check_run_folder,
    locked_folder,
    model_folder,
    move_aside,
    write_environment,
    write_run_file,
)
from manyformer.training.schedules import make_schedule, make_warmup
from manyformer.training.train_state import RunAmounts, TrainState, end_reason
from manyformer.training.training_loop import TrainingLoop
from manyformer.training.validation import (
    AverageChoice,
    ResultRecord,
    Validator,
    WeightChoice,
    choose_weights,
    model_card,
    plain_pass,
)

NEXT_COMMANDS = 3
"""So many commands that use the model are shown at the end."""

ModelBuilder = Callable[[RunConfig, OpenedData, torch.device], Model]
"""Builds the model of a run, whose data decides some of its keywords."""

DataOpener = Callable[[RunConfig, Path, LogFn], OpenedData]
"""Opens the data of a run; prepared data is written to the run folder, slow steps are logged."""


@resumable()
def train(
    run: RunConfig | str | Path | ModelSource | GivenTraining,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    data: Any = None,
    eval_data: Any = None,
    loss: LossFn | None = None,
    fresh: bool = False,
    on_event: EventListener | None = None,
) -> TrainResult:
    """Train a run, or resume it where it was interrupted, and save the final model in its folder.

    `run` is a RunConfig, a run file, a shipped run's name or a recipe's name, the latter three with overrides such as
    `["depth=4", "limits.steps=500"]`. `fresh` renames the folder of an earlier run and starts over. `on_event` receives
    training events (manyformer.training.events); None prints them on standard output. Raises UserError for mistakes
    that the user can correct, `TrainingInterrupted` after Ctrl-C or SIGTERM, and `ProcessFailed` where another of
    torchrun's processes has gone.

    With `data`, `run` is a recipe's name, a module of this library or any other, which is trained in place, or a class
    or function that gives one, whose weights the seed decides. `data` gives batches: a DataLoader, a list, a function
    that gives an iterator, an iterator, or a data set of torch or of `datasets`, whose rows are put into batches of
    batch.tokens. A batch is a tensor of token rows, a pair (input, target), or a mapping of what `forward` takes. The
    module returns logits, a loss or both; `loss(output, target)` is for other outputs. `eval_data` is scored.
    """
    with ExitStack() as resources:
        objects = None
        if isinstance(run, GivenTraining):
            objects = run
            config = objects.run
        elif data is not None or not isinstance(run, RunConfig | str | Path):
            objects = GivenTraining.of(run, overrides, data, eval_data, loss)
            config = objects.run
        else:
            if eval_data is not None or loss is not None:
                raise UserError("eval_data and loss go with data=; a run of this kind names its own data")
            config = as_training_run(run, overrides)
        # a listener of the caller is the caller's to close
        listener = reporter() if on_event is None else on_event
        if on_event is None and isinstance(listener, LiveReporter):
            resources.callback(listener.close)
        process_group = process_group_from_environment()
        # torchrun has started the processes already; otherwise they are started here
        if process_group is None and config.devices > 1:
            from manyformer.training.launch import launch

            return launch(config, fresh=fresh, on_event=listener)
        if process_group is None:
            return train_in_process(config, SINGLE_PROCESS_GROUP, fresh=fresh, on_event=listener, objects=objects)
        # a launcher repeats the command when it starts processes again, and each time would begin anew
        if fresh:
            remedy = f"rename {config.out}, or choose another out"
            raise UserError(f"fresh would start over whenever torchrun starts the processes again; {remedy}")
        with name_lost_process():
            return train_in_process(config, process_group, fresh=False, on_event=listener, objects=objects)


def train_in_process(
    run: RunConfig,
    process_group: ProcessGroup,
    *,
    fresh: bool,
    on_event: EventListener,
    objects: GivenTraining | None = None,
) -> TrainResult:
    """Train a run in this process of the group; only the main process reports events.

    A model and data that are objects take the place of those that the run names."""
    assert run.out is not None
    out = Path(run.out)
    device = choose_device(run.device, process_group)
    use_device(device)
    with (
        initialized_process_group(process_group, device, timeout_minutes=run.process_timeout),
        handle_stop_signals() as stop_signal,
        deterministic_algorithms(on=run.deterministic),
        ExitStack() as resources,
    ):
        with process_group.raise_together():
            if process_group.is_main_process:
                check_run_folder(out)
                if fresh and (moved := move_aside(out)):
                    on_event(TrainingNote(f"the earlier run is now in {moved}"))
                resources.enter_context(locked_folder(out))
                on_event = broadcast(on_event, log_file_reporter(out / "log.txt"))
        return TrainingSession(
            run,
            out,
            on_event if process_group.is_main_process else silent,
            stop_signal,
            open_run_data if objects is None else objects.open_data,
            process_group,
            None if objects is None else objects.build_model,
        ).train()


class TrainingSession:
    """Opens data, model and checkpoints of a run and trains it."""

    def __init__(
        self,
        run: RunConfig,
        out: Path,
        on_event: EventListener,
        stop_signal: StopSignal,
        open_data: DataOpener,
        process_group: ProcessGroup = SINGLE_PROCESS_GROUP,
        build: ModelBuilder | None = None,
    ) -> None:
        self.run = run
        self.out = out
        self.on_event = on_event
        self.process_group = process_group
        self._build = build or build_model
        self.card = get_recipe(run.recipe).card
        self.task = self.card.task.variant(run.data.kind)
        device = choose_device(run.device, process_group)
        strategy = choose_strategy(run.strategy, process_group)
        self.store = CheckpointStore(out / "checkpoints", process_group)
        checkpoint = self.store.newest(self._log)
        branch = None
        if checkpoint is None and run.branch_from is not None:
            branch = find_branch(run.branch_from, out, process_group)
        if checkpoint is None and branch is None and run.init_from is not None:
            # refused now, because data may take long to prepare
            read_spec(model_folder(run.init_from))
        if checkpoint is None:
            check_before_data(run, device)
        self._write_settings(checkpoint, device)
        smaller = "make data.length, batch.tokens or the other sizes of the data smaller"
        # the main process writes the prepared data, which the others then read
        with process_group.main_process_first(), report_out_of_memory("in the preparation of the data", smaller):
            self.data = open_data(run, out, self._log)
        self._make_model(checkpoint, branch, device)
        # before the model may be divided into shards
        self.num_parameters = sum(weight.numel() for weight in self.model.parameters())
        self.engine = make_engine(run, self.model, self.data.train, device, strategy)
        if process_group.rank:
            # equal weights, but different dropout in each process
            seed_everything(run.seed + 7919 * process_group.rank)
        self._ahead = batches_ahead(run.batch.ahead, self.data.train, self.engine.device)
        self._copies = DeviceCopies(self.engine.device)
        self.validator = self._make_validator(strategy.data_group)
        self.loop = self._make_loop(checkpoint or branch, checkpoint, stop_signal)
        # before a checkpoint is read, whose notes come after what the run is
        self._report_started(device)
        if checkpoint is not None:
            self.loop.resume(checkpoint)
            self._log(f"resuming from step {checkpoint.step}")
        elif branch is not None:
            self.loop.begin_branch(branch)
            self._log(f"going on from step {branch.step} of {branch.folder}")

    def _log(self, text: str) -> None:
        self.on_event(TrainingNote(text))

    def _write_settings(self, checkpoint: Checkpoint | None, device: torch.device) -> None:
        """Write what the run is and where it runs, by the main process alone."""
        with self.process_group.raise_together():
            if self.process_group.is_main_process:
                state = None
                if checkpoint is not None:
                    state = checkpoint.state.train_state
                write_run_file(self.out, self.run, state=state, log=self._log)
                write_environment(self.out, device, has_checkpoint=checkpoint is not None, log=self._log)

    def _make_model(self, checkpoint: Checkpoint | None, branch: Checkpoint | None, device: torch.device) -> None:
        """Build the model as it is trained; without a checkpoint, which has the weights, also with its first ones."""
        if branch is not None:
            self._take_generation_settings(branch)
        # the seed decides the weights, whatever the preparation of the data has drawn
        seed_everything(self.run.seed)
        self.model = self._build(self.run, self.data, device)
        if checkpoint is None and branch is None:
            self._init_weights(self.run.init_from)
        # the weights are those of the checkpoint, but no checkpoint holds how texts begin and end
        elif (self.out / GENERATION_FILE).is_file():
            self.model.generation = GenerationSettings.read(self.out / GENERATION_FILE)
        adapt_model(self.model, self.run)
        loss = self.run.loss
        if loss.gate_penalty is not None:
            attach_gates(self.model, penalty=loss.gate_penalty, part=loss.gated_part, lr_scale=loss.gate_lr_scale)

    def _take_generation_settings(self, branch: Checkpoint) -> None:
        """Copy how the texts of the other run begin and end, which no checkpoint holds."""
        file = branch.folder.parent.parent / GENERATION_FILE
        with self.process_group.raise_together():
            if self.process_group.is_main_process and file.is_file():
                GenerationSettings.read(file).write(self.out / GENERATION_FILE)

    def _make_validator(self, rows: ProcessGroup) -> Validator:
        """The scoring of held-out data, of which each process of `rows` reads its share."""
        valid = self.data.valid
        if rows.size != 1:
            # each process scores its rows, and their sums are added
            valid = valid.shard(rows.rank, rows.size)
        read: PassReader = plain_pass
        if self._ahead:
            read = pass_reader(self._ahead, self._prepare_batch)
        return Validator(self.engine.scorer, valid, self.run.evaluate, self.process_group, task=self.task, read=read)

    def _init_weights(self, source: str | None) -> None:
        if source is None:
            check_random_init(self.model)
            return
        self._log(load_initial_weights(self.model, source, self.data))
        if self.run.transfer.steps is not None:
            self._log(transfer_from(source, self.model, self.data, self.run.transfer, self._log))
        if self.model.generation is not None and self.process_group.is_main_process:
            # for a run that is resumed, where the first model may be gone
            self.model.generation.write(self.out / GENERATION_FILE)

    def train(self) -> TrainResult:
        """Train to the end, choose the weights and save the model."""
        if (previous := self._finished_result()) is not None:
            return previous
        reason = self._run_loop()
        step = self.loop.train_state.step
        if make_warmup(self.run)(step, self.loop.step_progress) < 1:
            remedy = "give it more time, or set schedule.warmup to fewer steps"
            problem = f"the run has ended within its warm-up, after {step} steps"
            self._log(f"{problem}: the learning rate never reached its peak; {remedy}")
        choice = self._choose_weights()
        result = TrainResult(self.out, step, reason, choice.description, choice.scores, self.validator.bounds)
        metric = self.validator.metric
        if metric in choice.scores and not is_comparable(choice.scores[metric]):
            problem = f"the {metric} of the final weights is {choice.scores[metric]:g}, which is no finite number"
            remedy = "try a lower optim.lr, a longer schedule.warmup or optim.max_grad_norm"
            self._log(f"{problem}: the model is of no use; {remedy}, and start over with --fresh")
        # all processes take part: each holds a shard
        full_model = self.engine.strategy.full_model(self.model)
        with self.process_group.raise_together(), report_disk_full(f"the final model in {self.out}"):
            if self.process_group.is_main_process:
                merge_lora(full_model)
                if self.run.loss.gate_penalty is not None:
                    fold_gates(full_model).write(self.out / GATES_FILE)
                with replacement_folder(self.out / "model") as folder:
                    self.data.save(folder)
                    card_text = model_card(self.run, self.card, self.model, self.data.describe(), result)
                    atomic_write_text(folder / "README.md", card_text)
                    # the settings of this model, also while the run is continued with others
                    atomic_write_text(folder / RUN_FILE, dump_run(self.run))
                    full_model.write_files(folder)
                # last, because the record says that the model is complete
                ResultRecord.of(result, self.run).write(self.out / RESULT_FILE)
        return self._report_finished(result)

    def _report_finished(self, result: TrainResult) -> TrainResult:
        """Report the result with commands that use the trained model."""
        commands = [f"manyformer plot {self.out}"]
        # no command can read data that a program gives
        if not isinstance(self.run.data, GivenData):
            own_commands = self.task.next_commands(self.out, self.run.data)
            commands = [*own_commands, f"manyformer evaluate {self.out}", *commands]
        if "attention_maps" in self.card.reasons:
            commands = [line for line in commands if not line.startswith("manyformer view ")]
        self.on_event(TrainingFinished(result, tuple(commands[:NEXT_COMMANDS])))
        return result

    def _finished_result(self) -> TrainResult | None:
        """The result of this run if it has already finished, else None."""
        file = self.out / RESULT_FILE
        train_state = self.loop.train_state
        if not file.exists() or end_reason(self.run, train_state) is None or not (self.out / "model").is_dir():
            return None
        try:
            record = ResultRecord.read(file)
            VerifiedFolder.open(self.out / "model").verify()
        except UserError as damage:
            self._log(f"{damage}; the final model is written again")
            return None
        # the run went on, or other checkpoints would be chosen now
        if record.step != train_state.step or record.save != self.run.save.model_dump(mode="json"):
            return None
        self._log("this run has already finished; its model is unchanged")
        return self._report_finished(record.result(self.out, self.validator.bounds))

    def _run_loop(self) -> str:
        try:
            with self.loop.stop_signal.awaited(), ExitStack() as resources:
                # whatever ends the loop, threads end and trackers write what they hold
                for sink in self.loop.sinks:
                    resources.callback(sink.close)
                resources.callback(self.loop.feed.close)
                return self.loop.train()
        except NotWritable as error:
            steps = self.store.steps()
            saved = ""
            if steps:
                saved = f"; {self.store.path(steps[-1])} is intact"
            remedy = "Mend that"
            if isinstance(error, DiskFull):
                remedy = "Free some space"
            raise type(error)(f"{error}{saved}. {remedy}: the same command continues.", error.reason) from error
        except OutOfMemory as error:
            steps = self.store.steps()
            saved = "no checkpoint was written"
            if steps:
                saved = f"{self.store.path(steps[-1])} is intact"
            raise OutOfMemory(f"{error}; {saved}") from error

    def _make_loop(
        self, source: Checkpoint | None, checkpoint: Checkpoint | None, stop_signal: StopSignal
    ) -> TrainingLoop:
        """The loop that goes on from `source`, which is the `checkpoint` of this run or one of another run."""
        run = self.run
        feed = self.data.train
        rows = self.engine.strategy.data_group
        if rows.size > 1:
            feed = feed.shard(rows.rank, rows.size)
        if self._ahead:
            feed = AheadFeed(feed, self._ahead, self._prepare_batch)
        return TrainingLoop(
            run,
            self.engine,
            feed,
            self.validator,
            learning_rate=make_schedule(
                run, width=self.model.spec.keywords.get("dim"), branch=self._branch_point(source)
            ),
            checkpoint_writer=CheckpointWriter(self.store, self.engine, feed, self._log),
            sinks=self._make_sinks(checkpoint) if self.process_group.is_main_process else (),
            on_event=self.on_event,
            stop_signal=stop_signal,
        )

    def _branch_point(self, source: Checkpoint | None) -> RunAmounts | None:
        """What had been consumed where this run went on from another one."""
        if source is None:
            return None
        state = source.state.train_state
        # a run that itself began as a branch may be branched again, which the record of its own begin does not tell
        if self.run.branch_from is not None and not source.folder.is_relative_to(self.store.folder):
            return state.amounts
        return state.branch

    def _prepare_batch(self, batch: Batch) -> PreparedBatch:
        """What the thread that reads ahead does with a batch."""
        return self._copies(self.engine.prepare(batch))

    def _make_sinks(self, checkpoint: Checkpoint | None) -> list[MetricsSink]:
        if checkpoint is None:
            state = TrainState()
        else:
            state = checkpoint.state.train_state
        names = [*self.data.train.score_names, *(f"valid_{name}" for name in self.validator.score_names())]
        rows = state.metrics_rows
        rows_sum = state.metrics_sum
        sinks: list[MetricsSink] = [MetricsFiles(self.out, rows=rows, rows_sum=rows_sum, log=self._log, scores=names)]
        return [*sinks, *open_trackers(self.run, self.out, last_step=0 if checkpoint is None else checkpoint.step)]

    def _report_started(self, device: torch.device) -> None:
        num_threads = torch.get_num_threads()
        threads = ""
        if device.type == "cpu":
            threads = f", {num_threads} thread{'s' * (num_threads > 1)}"
        size = self.process_group.size
        strategy = self.run.strategy
        processes = ""
        if size > 1:
            processes = f", {size} processes ({strategy})"
        summary_lines = (
            *self.data.glance(),
            *self._model_lines(),
            (
                "device",
                f"{device}{threads}{processes}, seed {self.run.seed}{', deterministic' * self.run.deterministic}",
            ),
            ("run", str(self.out)),
        )
        self.on_event(TrainingStarted(summary_lines, self.out))

    def _model_lines(self) -> Iterator[tuple[str, str]]:
        """Yield summary lines about the model, its carried state and the neighbours that it retrieves."""
        trained = sum(weight.numel() for weight in self.engine.weights)
        part = ""
        if trained < self.num_parameters:
            part = f", {trained:,} of them trained"
        yield "model", f"{self.model.spec.recipe}, {self.num_parameters:,} parameters{part}"
        if self.model.carries_state:
            empty = "always empty in training: set data.packing=contiguous for rows that continue"
            yield "memory", "carried from batch to batch" if self.engine.carried_state.enabled else empty
        if uses_neighbours(self.model):
            none = "none (data.neighbours takes a folder that `manyformer datastore neighbours` has written)"
            yield "neighbours", str(getattr(self.run.data, "neighbours", None) or none)

    def _choose_weights(self) -> WeightChoice:
        """Load the final weights: of the best intact checkpoint, else of the last, or a better average of several."""
        train_state = self.loop.train_state
        save = self.run.save
        last = train_state.step
        label = "the moving averages" if self.engine.scores_average else "those"
        single = WeightChoice(self.store.path(last), f"{label} of the last step, {last}", train_state.scores)
        for rank, entry in enumerate(train_state.ranking[: save.keep_best]):
            # the checkpoint of the last step exists in any case
            if entry.step == last:
                break
            if self.store.is_intact(entry.step, self._log):
                description = f"{label} of step {entry.step}, the best{' of the intact ones' if rank else ''}"
                single = WeightChoice(self.store.path(entry.step), description, entry.scores)
                break
        return choose_weights(self.engine, single, self._average_choice(last), self.validator)

    def _average_choice(self, last: int) -> AverageChoice | None:
        """The average that the final model has if it scores better than one checkpoint, None without one."""
        engine = self.engine
        if engine.average is not None and not engine.scores_average:
            folder = self.store.path(last)
            return AverageChoice(
                f"the moving average of step {last}", lambda: engine.read_weights(folder, averaged=True)
            )
        save = self.run.save
        if not save.average_last:
            return None
        scheduled = self.loop.scheduled_steps()[-save.average_last :]
        averaged = [self.store.path(step) for step in scheduled if self.store.is_intact(step, self._log)]
        if len(averaged) < 2:
            return None
        return AverageChoice(
            f"the average of the last {len(averaged)} checkpoints", lambda: engine.average_checkpoints(averaged)
        )
