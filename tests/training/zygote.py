"""Real processes that train and are killed: `python zygote.py FOLDER SCENARIO:NUMBER ...` prints what happened as JSON.

A process that has imported everything forks for each life of a run, so that a hundred kills cost no hundred imports.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import RunConfig
from manyformer.training import TrainingEvent, TrainingInterrupted, TrainingProgress, silent
from manyformer.training.metrics import TIME_COLUMNS

# Forking is safe only while there is one thread.
torch.set_num_threads(1)


def a_run(folder: Path, name: str, steps: int = 40, ahead: int = 0) -> RunConfig:
    """Real text, dropout, evaluations and checkpoints that do not fall together; `ahead` batches are read early."""
    text = folder / "text.txt"
    if not text.exists():
        words = random.Random(0).choices(["to", "be", "or", "not", "that", "is", "the", "question"], k=3000)
        text.write_text(" ".join(words))
    return RunConfig.model_validate(
        {
            "recipe": "transformer-lm",
            "model": {"dim": 16, "depth": 2, "heads": 2, "dropout": 0.2},
            "data": {"kind": "text", "path": str(text), "tokenizer": "char", "length": 16},
            "batch": {"tokens": 128, "accumulate": 2, "ahead": ahead},
            "limits": {"steps": steps},
            "evaluate": {"every": 7, "batches": 2},
            "save": {"every": 3, "keep_last": 2, "average_last": 2},
            "log": {"every": 2},
            "out": str(folder / name),
        }
    )


def begin(run: RunConfig, *, listen: Callable[[TrainingEvent], None] = silent, fresh: bool = False) -> int:
    """Train in a new process; its exit code is 0, 130 when interrupted, 2 for a mistake told in a sentence."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        mf.train(run, on_event=listen, fresh=fresh)
        code = 0
    except TrainingInterrupted as stop:
        (Path(str(run.out)) / "said.txt").write_text(str(stop))
        code = 130
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def warm_up() -> None:
    """Import what torch imports only when the first optimiser is made; nothing here starts a thread."""
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros(2, 2)
    torch.optim.AdamW([weight], fused=True).step()


def end(child: int) -> int:
    """The exit code of a process, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(run: RunConfig) -> dict[str, Any]:
    """Everything that must not depend on interruptions."""
    out = Path(str(run.out))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "rows": [{k: v for k, v in row.items() if k not in TIME_COLUMNS} for row in rows],
        "weights": (out / "model/model.safetensors").read_bytes().hex(),
        "checkpoints": sorted(path.name for path in (out / "checkpoints").iterdir()),
    }


def kills(folder: Path, number: int, ahead: int = 0) -> dict[str, Any]:
    """Runs that are killed at random moments and begun again until they end, `number` kills in all.

    They read `ahead` batches early, of which the run that they are compared with reads none."""
    reference = a_run(folder, "reference")
    assert end(begin(reference)) == 0
    began = time.monotonic()
    assert end(begin(a_run(folder, "again"))) == 0
    lasts = time.monotonic() - began
    expected, chance = outcome(reference), random.Random(number)
    done, runs, same = 0, 0, 0
    while done < number:
        run = a_run(folder, f"run-{runs}", ahead=ahead)
        while True:
            child = begin(run)
            time.sleep(chance.uniform(0, lasts) if done < number else 0)
            if done < number:
                os.kill(child, signal.SIGKILL)
            code = end(child)
            assert code in (0, -signal.SIGKILL), code
            if code == 0:
                break
            done += 1
        runs += 1
        same += outcome(run) == expected
    return {"kills": done, "runs": runs, "same": same, "seconds": lasts}


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def pausing(folder: Path) -> tuple[Path, Callable[[TrainingEvent], None]]:
    """A listener that waits after step 6, and the file that appears when it does; it goes on when the file is gone."""
    reached = folder / "reached"

    def listen(event: TrainingEvent) -> None:
        if isinstance(event, TrainingProgress) and event.step == 6:
            reached.touch()
            while reached.exists():
                time.sleep(0.01)

    return reached, listen


def interrupts(folder: Path, number: int) -> dict[str, Any]:
    """A polite stop by signal `number` at step 6, and the way on; meanwhile another process wants the folder."""
    reference, run = a_run(folder, "reference", 12), a_run(folder, "run", 12)
    assert end(begin(reference)) == 0
    reached, listen = pausing(folder)
    first = begin(run, listen=listen)
    wait_for(reached)
    busy = [end(begin(run)), end(begin(run, fresh=True))]
    os.kill(first, number)
    reached.unlink()
    stopped = end(first)
    said = (folder / "run/said.txt").read_text()
    (folder / "run/said.txt").unlink()
    resumed = end(begin(run))
    same = [outcome(run) == outcome(reference)]
    fresh = end(begin(run, fresh=True))
    same.append(outcome(run) == outcome(reference))
    aside = sorted(path.name for path in folder.glob("run.*"))
    codes = {"busy": busy, "stopped": stopped, "resumed": resumed, "fresh": fresh}
    return {"said": said, "same": same, "aside": aside, **codes}


def impatient(folder: Path, number: int) -> dict[str, Any]:
    """Ctrl-C twice, in a run that reads so many batches ahead."""
    reached, listen = pausing(folder)
    child = begin(a_run(folder, "run", ahead=number), listen=listen)
    wait_for(reached)
    for _ in range(2):
        os.kill(child, signal.SIGINT)
        time.sleep(0.2)
    return {"code": end(child)}


SCENARIOS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "kills": kills,
    "kills_ahead": partial(kills, ahead=3),
    "interrupts": interrupts,
    "impatient": impatient,
}


def main(folder: Path, scenarios: list[str]) -> None:
    """Each scenario is NAME:NUMBER and gets a folder of its own."""
    warm_up()
    actual = {}
    for scenario in scenarios:
        name, _, number = scenario.partition(":")
        own = folder / scenario.replace(":", "-")
        own.mkdir()
        actual[scenario] = SCENARIOS[name](own, int(number))
    print(json.dumps(actual))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
