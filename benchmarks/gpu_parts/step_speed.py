"""Training steps in bfloat16: ours against released models, and the utilization of the GPU at 100 M parameters."""

import statistics
from collections.abc import Callable
from functools import partial

import frame
import steps
import torch
from peers import MODELS, Size
from torch import Tensor, nn

import manyformer as mf
from gpu_parts.outcome import Item, Outcome, Setting, judged
from manyformer.analysis.benchmarks import paired_ratio, take_turns
from manyformer.analysis.planning.accelerators import find_accelerator
from manyformer.recipes.parts.model_summary import count_parameters

ROUNDS = 5
STEPS_IN_A_ROW = 8
PROFILED_STEPS, MOST_KERNELS = 5, 24
PEER_GOALS = {"x-transformers": 1.0, "GPT-2": 0.9}
"""Our time as a share of theirs."""
UTILIZATION_GOAL = 0.40


def items(setting: Setting) -> dict[str, Item]:
    """Steps against peers, and our own compiled."""
    return {
        "eager, against peers": partial(against_peers, setting),
        "compiled, 100 M parameters": partial(utilization, setting),
        "where the time of the compiled step goes": partial(profile_step, setting),
    }


def step_of(setting: Setting, model: nn.Module, tokens: Tensor, *, compiled: bool = False) -> frame.Step:
    """Loss, gradients and fused AdamW under autocast."""
    loss = steps.language_loss(model, tokens)

    def autocast_loss() -> Tensor:
        with setting.autocast():
            return loss()

    backend = "inductor" if setting.on_gpu else "aot_eager"
    run: Callable[[], Tensor] = torch.compile(autocast_loss, backend=backend) if compiled else autocast_loss
    return steps.train(model, run)


def against_peers(setting: Setting) -> Outcome:
    """The step of every installed model of one size."""
    size = Size(32, 2, 2, 64, 64) if setting.tiny else Size(768, 12, 12, 32000, 1024)
    tokens = torch.randint(size.vocab, (2 if setting.tiny else 8, size.max_length), device=setting.device)
    jobs, absent = {}, []
    for name, make in MODELS.items():
        try:
            model = make(size).to(setting.device)
        except ImportError as error:
            absent.append(f"{name} is not installed ({error.name})")
            continue
        jobs[name] = step_of(setting, model, tokens)
        jobs[name]()
    times = take_turns(jobs, ROUNDS, setting.device)
    numbers = {f"{name}, ms": 1e3 * statistics.median(each) for name, each in times.items()}
    ratios = {name: paired_ratio(times["ours"], each).median for name, each in times.items() if name != "ours"}
    numbers |= {f"ours over {name}": ratio for name, ratio in ratios.items()}
    misses = [
        f"{ratio:.2f} of {name}, goal {PEER_GOALS[name]}" for name, ratio in ratios.items() if ratio > PEER_GOALS[name]
    ]
    sentence = f"{tokens.shape[0]} x {size.max_length} tokens, d {size.dim}, {size.depth} layers"
    return judged("; ".join([sentence, *absent]), misses if setting.has_goals else [], numbers)


def utilization(setting: Setting) -> Outcome:
    """Model operations of our compiled step as a share of the accelerator's published peak."""
    size = Size(32, 2, 2, 64, 64) if setting.tiny else Size(768, 12, 12, 32000, 1024)
    torch.set_float32_matmul_precision("high")
    model = mf.build("transformer-lm", **size._asdict()).to(setting.device)
    tokens = torch.randint(size.vocab, (2 if setting.tiny else 16, size.max_length), device=setting.device)
    paths = [*mf.explain(model, tokens).values()]
    step = step_of(setting, model, tokens, compiled=True)
    step()

    def steps_in_a_row() -> None:
        # as in training, where the host is steps ahead of the device: it waits for none of them
        for _ in range(STEPS_IN_A_ROW):
            step()

    seconds = statistics.median(take_turns({"ours": steps_in_a_row}, ROUNDS, setting.device)["ours"]) / STEPS_IN_A_ROW
    flops = tokens.numel() * model_flops_per_token(model, size)
    numbers = {"step, ms": 1e3 * seconds, "tokens/s": tokens.numel() / seconds, "TFLOP/s": flops / seconds / 1e12}
    numbers["parameters"] = float(count_parameters(model))
    sentence, misses = f"{count_parameters(model):,} parameters, {tokens.shape[0]} x {size.max_length} tokens", []
    accelerator = find_accelerator(torch.cuda.get_device_name(setting.device)) if setting.on_gpu else None
    if accelerator is None:
        return judged(f"{sentence}; the peak of this device is not known", misses, numbers, paths)
    share = numbers["utilization"] = flops / seconds / accelerator.flops
    if setting.has_goals and share < UTILIZATION_GOAL:
        misses.append(f"{share:.0%} of {accelerator.name}'s peak, goal {UTILIZATION_GOAL:.0%}")
    return judged(sentence, misses, numbers, paths)


def profile_step(setting: Setting) -> Outcome:
    """The kernels of a compiled step of 100 M parameters that take longest."""
    size = Size(32, 2, 2, 64, 64) if setting.tiny else Size(768, 12, 12, 32000, 1024)
    torch.set_float32_matmul_precision("high")
    model = mf.build("transformer-lm", **size._asdict()).to(setting.device)
    tokens = torch.randint(size.vocab, (2 if setting.tiny else 16, size.max_length), device=setting.device)
    step = step_of(setting, model, tokens, compiled=True)
    for _ in range(3):
        step()
    with torch.profiler.profile() as profile:
        for _ in range(PROFILED_STEPS):
            step()
        if setting.on_gpu:
            torch.cuda.synchronize(setting.device)
    kernels: dict[str, float] = {}
    for event in profile.key_averages():
        microseconds = event.self_device_time_total if setting.on_gpu else event.self_cpu_time_total
        if microseconds and (not setting.on_gpu or event.device_type == torch.autograd.DeviceType.CUDA):
            kernels[event.key[:60]] = microseconds / PROFILED_STEPS / 1e3
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:MOST_KERNELS]
    numbers = {"all kernels, ms": sum(kernels.values())} | {f"{name}, ms": each for name, each in longest}
    return judged(f"{len(kernels)} kernels in a step", [], numbers)


def model_flops_per_token(model: nn.Module, size: Size) -> int:
    """6 for each weight of a matrix product and 6 l d for each layer's causal attention, its visible half alone."""
    embeddings = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding))
    products = count_parameters(model) - embeddings + size.vocab * size.dim
    return 6 * products + 6 * size.depth * size.max_length * size.dim
