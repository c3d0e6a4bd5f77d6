"""What the host costs: launches of eager steps, first calls of FlexAttention, prompts of several lengths, captures."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import steps
import torch

import manyformer as mf
from gpu_parts.decoding_speed import decoder_of
from gpu_parts.flex_paths import row_positions
from gpu_parts.outcome import Item, Outcome, Setting, judged
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.positions import NoPosition


def items(setting: Setting) -> dict[str, Item]:
    """One item a question."""
    return {
        "launches": partial(launches, setting),
        "packed rows": partial(packed_rows, setting),
        "first calls of FlexAttention": partial(first_flex_calls, setting),
        "prompts of several lengths": partial(ragged_prompts, setting),
        "captured again": partial(captured_again, setting),
    }


def synchronize(setting: Setting) -> None:
    """Wait for all that was launched."""
    if setting.on_gpu:
        torch.cuda.synchronize(setting.device)


def milliseconds(setting: Setting, function: Callable[[], Any], calls: int) -> tuple[float, float]:
    """The time of a call, and the part of it after which the host was free again."""
    function()
    synchronize(setting)
    started = time.perf_counter()
    for _ in range(calls):
        function()
    launched = time.perf_counter() - started
    synchronize(setting)
    return 1e3 * (time.perf_counter() - started) / calls, 1e3 * launched / calls


def launches(setting: Setting) -> Outcome:
    """Where launching takes as long as the step, the device waits for the host."""
    numbers = {}
    size = {"dim": 32, "depth": 2, "vocab": 64} if setting.tiny else {"dim": 768, "depth": 12, "vocab": 32000}
    shape = (2, 32) if setting.tiny else (8, 1024)
    for name in ("transformer-lm", "llama"):
        model = mf.build(name, **size).to(setting.device)
        loss = steps.language_loss(model, torch.randint(size["vocab"], shape, device=setting.device))

        def autocast_loss(loss: Callable[[], torch.Tensor] = loss) -> torch.Tensor:
            with setting.autocast():
                return loss()

        step, launch = milliseconds(setting, steps.train(model, autocast_loss), 2 if setting.tiny else 8)
        numbers |= {f"{name} step, ms": step, f"{name} launched after, ms": launch}
        del model
    return judged(f"eager steps of {shape[0]} x {shape[1]} tokens", [], numbers)


def packed_rows(setting: Setting) -> Outcome:
    """A step of packed rows against one of whole rows of as many tokens."""
    from manyformer.nn.batches import CausalLMBatch

    numbers = {}
    size = {"dim": 32, "depth": 2, "vocab": 64} if setting.tiny else {"dim": 768, "depth": 12, "vocab": 32000}
    rows, length = (2, 64) if setting.tiny else (16, 1024)
    model = mf.build("transformer-lm", **size).to(setting.device)
    tokens = torch.randint(size["vocab"], (rows, length), device=setting.device)
    segments = (torch.arange(length, device=setting.device) * 4 // length).expand(rows, -1).contiguous()
    for name, batch in {
        "whole": CausalLMBatch(tokens, tokens.roll(-1, 1)),
        "packed": CausalLMBatch(tokens, tokens.roll(-1, 1), segments),
    }.items():

        def loss(batch: CausalLMBatch = batch) -> torch.Tensor:
            with setting.autocast():
                found = model.loss(batch)
            return found.total / found.targets

        step, launch = milliseconds(setting, steps.train(model, loss), 2 if setting.tiny else 6)
        numbers |= {f"{name} rows, ms": step, f"{name} rows launched after, ms": launch}
    return judged(f"eager steps of {rows} x {length} tokens, four documents a row", [], numbers)


def first_flex_calls(setting: Setting) -> Outcome:
    """Seconds of the first call of a mask: forward, with gradients, other lengths, another mask, packed rows."""
    lengths = (64, 80, 96) if setting.tiny else (1024, 1536, 2048)

    def seconds(mask: m.Mask, length: int, documents: Sequence[int] | None = None, *, grad: bool = True) -> float:
        positions = row_positions(None if documents is None else list(documents), length, setting.device)
        dtype = torch.bfloat16 if setting.on_gpu else torch.float32
        tensors = [
            torch.randn(1, 4, length, 64, device=setting.device, dtype=dtype, requires_grad=grad) for _ in range(3)
        ]
        started = time.perf_counter()
        y = SoftmaxKernel(mask)(KernelCall(*tensors, positions, positions, NoPosition())).y
        if grad:
            y.sum().backward()
        synchronize(setting)
        return time.perf_counter() - started

    window, half = m.Causal() & m.Window(100), lengths[0] // 2
    numbers = {
        "forward, s": seconds(window, lengths[0], grad=False),
        "gradients, s": seconds(window, lengths[0]),
        "again, s": seconds(window, lengths[0]),
        "second length, s": seconds(window, lengths[1]),
        "third length, s": seconds(window, lengths[2]),
        "another window, s": seconds(m.Causal() & m.Window(50), lengths[2]),
        "packed, s": seconds(m.Causal(), lengths[0], [0] * half + [1] * (lengths[0] - half)),
        "packed otherwise, s": seconds(m.Causal(), lengths[0], [0] * 10 + [1] * (lengths[0] - 10)),
    }
    return judged("first calls of FlexAttention in a process", [], numbers)


def ragged_prompts(setting: Setting) -> Outcome:
    """Milliseconds of a step after prompts of several lengths."""
    numbers = {}
    model = decoder_of(setting, "transformer-lm")
    for rows in (2, 8):
        prompts = [list(range(1, 17 - index)) for index in range(rows)]
        for path in ("eager", "graph" if setting.on_gpu else "static"):
            write = partial(mf.generate, model, prompts, stop_ids=(), batch=rows, step_path=path)
            write(max_new=3)
            short = min(_seconds(setting, partial(write, max_new=3)) for _ in range(2))
            long = min(_seconds(setting, partial(write, max_new=35)) for _ in range(2))
            numbers[f"{path}, {rows} rows, ms a token"] = 1e3 * (long - short) / 32
    return judged("steps of 100 M parameters after prompts of several lengths", [], numbers)


def captured_again(setting: Setting) -> Outcome:
    """The same call three times: what is captured once should not be captured again."""
    model = decoder_of(setting, "transformer-lm")
    path = "graph" if setting.on_gpu else "static"
    write = partial(mf.generate, model, [list(range(1, 17))], stop_ids=(), max_new=32, step_path=path)
    numbers = {f"call {number}, ms": 1e3 * _seconds(setting, write) for number in (1, 2, 3)}
    return judged("32 tokens after 16", [], numbers)


def _seconds(setting: Setting, function: Callable[[], Any]) -> float:
    synchronize(setting)
    started = time.perf_counter()
    function()
    synchronize(setting)
    return time.perf_counter() - started
