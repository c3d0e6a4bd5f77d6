"""A program with models and data of its own, killed and started again: `python own_program.py FOLDER` prints JSON.

For each model and form of data: the losses of a run that nothing interrupted, those of one that was killed by SIGKILL
after step 7 of 12 and continued from its checkpoint of step 5, and the exit status of the killed process."""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import manyformer as mf
from manyformer.training import TrainingEvent, TrainingProgress, silent
from manyformer.training.metrics import TIME_COLUMNS

torch.set_num_threads(1)
VOCAB = 23
ROWS = torch.randint(VOCAB, (40, 13), generator=torch.Generator().manual_seed(1))
SETTINGS = {"limits.steps": 12, "save.every": 5, "log.every": 1, "evaluate.every": 4, "optim.lr": 0.01}


class GRU(nn.Module):
    """Logits of the next token, with dropout, whose random numbers a resumed run must draw again."""

    def __init__(self, vocab: int = VOCAB, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.gru(self.embed(tokens))[0]))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=1, n_head=2))


def x_transformer() -> nn.Module:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    body = TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=Decoder(dim=16, depth=1, heads=2))
    return AutoregressiveWrapper(body)


class NoisyRows(IterableDataset[Tensor]):
    """Rows in a stream, with random numbers of torch's generator in them."""

    def __iter__(self) -> Iterator[Tensor]:
        return ((row + int(torch.randint(3, ()))) % VOCAB for row in ROWS)


def labelled() -> list[dict[str, Tensor]]:
    return [{"input_ids": rows, "labels": rows} for rows in ROWS.split(8)]


DATA: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(ROWS, batch_size=8, shuffle=True),
    "loader-generator": lambda: DataLoader(ROWS, 8, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "rows": lambda: TensorDataset(ROWS[:, :-1], ROWS[:, 1:]),
    "stream": NoisyRows,
    "function": lambda: lambda: iter(ROWS.split(8)),
    "iterator": lambda: iter(ROWS.repeat(4, 1).split(8)),
    "mappings": labelled,
}
MODELS: dict[str, Callable[..., nn.Module]] = {"gru": GRU, "gpt2": gpt2, "x-transformers": x_transformer}
CASES = [
    *(("gru", kind) for kind in DATA if kind != "mappings"),
    ("gpt2", "mappings"),
    ("x-transformers", "loader"),
]


def in_a_process(work: Callable[[], object]) -> int:
    """Carry out `work` in a process of its own, whose exit status is returned."""
    number = os.fork()
    if number == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def kill_after_step_7(event: TrainingEvent) -> None:
    if isinstance(event, TrainingProgress) and event.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)


def rows_of(out: Path) -> list[dict[str, float]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: value for name, value in row.items() if name not in TIME_COLUMNS} for row in rows]


def play(folder: Path, model: str, kind: str) -> dict[str, Any]:
    def train(out: Path, listener: Callable[[TrainingEvent], None]) -> None:
        held_out = labelled()[:1] if kind == "mappings" else [ROWS[:8]]
        settings = {**SETTINGS, "out": str(out)}
        if kind in ("rows", "stream"):
            settings["batch.tokens"] = 8 * 13
        mf.train(MODELS[model], settings, data=DATA[kind](), eval_data=held_out, on_event=listener)

    whole, cut = folder / f"{model}-{kind}", folder / f"{model}-{kind}-cut"
    statuses = [
        in_a_process(lambda: train(whole, silent)),
        in_a_process(lambda: train(cut, kill_after_step_7)),
        in_a_process(lambda: train(cut, silent)),
    ]
    return {"statuses": statuses, "whole": rows_of(whole), "resumed": rows_of(cut)}


def without_dropout() -> nn.Module:
    module = GRU()
    module.drop.p = 0.0
    return module


if __name__ == "__main__" and "RANK" in os.environ:
    # one of torchrun's processes, which have nothing but their rows to themselves
    divided = {**SETTINGS, "out": sys.argv[1], "strategy": "ddp"}
    mf.train(without_dropout, divided, data=DATA["loader"](), eval_data=[ROWS[:7]], on_event=silent)
elif __name__ == "__main__":
    if importlib.util.find_spec("x_transformers") is None:
        CASES.remove(("x-transformers", "loader"))
    else:
        import x_transformers  # noqa: F401 - imported once, before processes fork
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    print(json.dumps({f"{model}-{kind}": play(Path(sys.argv[1]), model, kind) for model, kind in CASES}))
