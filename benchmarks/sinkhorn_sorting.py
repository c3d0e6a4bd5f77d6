"""What balancing is worth to Sinkhorn attention: `sinkhorn-encoder` with and without it on blocks that must be sorted.

    python benchmarks/sinkhorn_sorting.py

Eight blocks of eight tokens hold one key each, in random order, and seven random symbols. Tasks, all scored by the
accuracy of the symbols: "pointers": a block's key names the block (by place) whose symbols it must give, so that its
own content decides; "sorting": slot i must give the symbols of the block with key i, so that blocks must be compared;
"marked": all blocks must give the symbols of the one marked block (for SortCut). Cases: balanced (8 iterations, the
default), rows only (no iterations), and local (each block sees itself alone). Both learning rates are shown: the
better one on fresh rows counts.
"""

import argparse

import torch
from torch import Tensor

import manyformer as mf
from manyformer.nn import SinkhornKernel

BLOCKS, SIZE, SYMBOLS = 8, 8, 16
TASKS = {"pointers": "network", "sorting": "products", "marked": "network"}


def rows(task: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets (-100 at keys): keys are the tokens 1 to 8, symbols those above."""
    keys = torch.stack([torch.randperm(BLOCKS, generator=generator) for _ in range(count)])
    symbols = torch.randint(SYMBOLS, (count, BLOCKS, SIZE - 1), generator=generator) + BLOCKS + 1
    if task == "pointers":
        origin = keys
    elif task == "sorting":
        origin = keys.argsort(1)
    else:
        # the block with key 0 is the marked one
        origin = keys.argmin(1, keepdim=True).expand(-1, BLOCKS)
    targets = symbols.gather(1, origin[..., None].expand_as(symbols))
    ignored = torch.full((count, BLOCKS, 1), -100)
    tokens = torch.cat([keys[..., None] + 1, symbols], 2).flatten(1)
    return tokens, torch.cat([ignored, targets], 2).flatten(1)


def accuracy(task: str, case: str, lr: float, seed: int, steps: int) -> float:
    """The accuracy after `steps` steps of 32 rows, in percent."""
    torch.manual_seed(seed)
    keywords = {"sinkhorn_iterations": 8 if case == "balanced" else None, "sorting": TASKS[task]}
    keywords |= {"sortcut_blocks": 1} if task == "marked" and case != "local" else {}
    sizes = {"vocab": BLOCKS + SYMBOLS + 1, "dim": 64, "depth": 2, "heads": 4, "block": SIZE, "max_length": 64}
    model = mf.build("sinkhorn-encoder", **sizes, **keywords, dropout=0.0)
    if case == "local":
        for kernel in (part for part in model.modules() if isinstance(part, SinkhornKernel)):
            # a very low temperature of scores that a constant dominates: each slot gets its own block
            kernel.sorting.register_forward_hook(lambda module, inputs, scores: scores * 0 + 1e3 * torch.eye(BLOCKS))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens, targets = rows(task, 32, generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        schedule.step()
    tokens, targets = rows(task, 256, torch.Generator().manual_seed(10_000 + seed))
    with torch.inference_mode():
        hits = model.eval()(tokens).logits.argmax(-1) == targets
    return 100 * float(hits[targets >= 0].float().mean())


def main() -> None:
    """Print a table of mean and range over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for task in TASKS:
        for case in ("balanced", "rows only", "local"):
            for lr in (0.002, 0.006):
                scores = [accuracy(task, case, lr, seed, options.steps) for seed in range(options.seeds)]
                mean = sum(scores) / len(scores)
                print(f"{task:9s} {case:10s} lr {lr}: {mean:5.1f} ({min(scores):.1f} to {max(scores):.1f})", flush=True)


if __name__ == "__main__":
    main()
