"""The page about recipes in other tools: its tables follow from docs/in_other_tools.json."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from manyformer.base.files.text_tables import markdown_table
from manyformer.recipes import RECIPES

FILE = Path(__file__).with_name("in_other_tools.json")

COLUMNS = {
    "own loop": "ten steps of AdamW in a loop of one's own, twice the same and with a falling loss",
    "accumulation": "two backward passes add up to twice the gradient",
    "autocast": "forward and backward under `torch.autocast` in bfloat16",
    "bf16": "`model.to(torch.bfloat16)`, forward and backward",
    "deepcopy": "a copy gives the same and shares nothing",
    "state_dict": "`torch.save` and `load_state_dict` into a model with other weights",
    "hooks": "forward hooks on all modules",
    "watch": "`watch=` changes no logits",
    "meta": "built on the meta device, `to_empty`, all memory filled with NaN, then `load_state_dict`",
    "meta, assign": "built on the meta device, then `load_state_dict(assign=True)`",
    "default bf16": "built under `torch.set_default_dtype(torch.bfloat16)`",
    "default float64": "built under `torch.set_default_dtype(torch.float64)`",
    "functional_call": "`torch.func.functional_call` with other weights, which leaves the model its own",
    "vmap gradients": "gradients of single rows by `vmap(grad(...))`",
    "jvp": "a slope by `torch.func.jvp`",
    "second derivative": "a Hessian product, its forward pass inside `manyformer.nn.plain_operations()`",
    "FakeTensor": "built and run, forward and backward, under `FakeTensorMode`",
    "make_fx": "the operations that `make_fx` records, on other inputs",
    "compile": "`torch.compile(fullgraph=True)` in training with dropout at three lengths, and its gradients",
    "export": "`torch.export` with dynamic batch and length, run at another shape, with gradients",
    "ONNX": "`torch.onnx.export` of the model itself, run by onnxruntime at another shape",
    "jit.trace": "`torch.jit.trace`, run on other inputs",
    "LoRA": "peft's adapters on all linear layers: one pass, decoding by single tokens and the merged model agree",
    "weight_norm": "`parametrizations.weight_norm` on all linear layers, with other norms: the same",
    "pruning": "random masks of `torch.nn.utils.prune` on all linear layers: the same",
    "quantization": "`quantize_dynamic` of all linear layers acts, in steps of single tokens as in calls of them",
    "torchao": "int8 weights of all linear layers by torchao: one pass and single tokens agree",
    "DDP": "gradients of `DistributedDataParallel` in two processes, each with its own batch, are those of one process",
    "FSDP2": "gradients of layers, then of the model, given to `fully_shard` in two processes are those of one",
    "dcp": "shards of two processes saved by `torch.distributed.checkpoint`, loaded into shards and into a whole model",
}

SIGNS = {"right": "●", "refused": "○", "error": "×", "wrong": "WRONG", "slow": "…", "skipped": ""}

TEXT = """\
# In other tools

A model is an ordinary `torch.nn.Module`: it can be trained in a loop of one's own, transformed, compiled and exported.
`python benchmarks/in_other_tools.py` puts every recipe, at a tiny size, into the tools below, each in a process of its
own, and compares with the plain model in float32: ● is equality to 1e-5 of the largest number (half precision: to a
tenth of the norm), ○ a refusal in a sentence, × anything else that was raised, … no end within the limit of time, and
an empty cell was not computed. Attention is computed by `sdpa_kernel(SDPBackend.MATH)` where torch's fused kernels have
no derivative. On torch 2.13, on a CPU.

## What to know

- **Second derivatives** (Hessian products, gradient penalties): compute the forward pass inside
  `with manyformer.nn.plain_operations():`. Handwritten gradients then give way to operations of torch, and attention is
  computed by its definition. Without it, a second derivative is refused in a sentence. Under `torch.func`, forward-mode
  derivatives, `torch.export` and `torch.jit.trace` this happens by itself.
- **Checks of values**, such as tokens beyond the vocabulary, are made in eager calls on a CPU alone: graphs and
  transformations do not have them.
- **Without memory**: tables of positions and decays follow from settings, so that a model built on the meta device is
  complete once its weights are loaded, by `to_empty` and `load_state_dict` or by `assign=True`.
- **Shared weights**: each module has one place, and what several share are weights, which have a name in each of their
  places in `state_dict()` and in `named_parameters(remove_duplicate=False)`. Layers that are applied several times
  (`loops`) have the names of their first place.
- **Exported graphs** compute recurrences as one chunk and let all experts see all tokens, so that batch and length may
  be any; `torch.jit.trace` gives a tuple of the tensors of the output. A graph of any length is refused where a loop
  over tokens is left (`bahdanau`, `lstm-lm`, `lstm-policy`) and where decays of channels halve the pairs of tokens
  (`gla`, `hgrn2`, `kda`, `rwkv-7`): export these with a fixed length. Scans (`mamba`, `mlstm`, the memory of
  `infini-attention`) go by doubling there, for up to 16,384 steps; where tokens are cut into blocks or segments, graphs
  ask for more tokens than the first of them has.
- **Graphs of `torch.compile`**: where data choose (experts, clusters, adaptive steps) or where a loop over tokens would
  be unrolled, a function is taken out of the graph; the remarks below name it with the number of graphs. Where
  the length is fixed, the loop in which chunks of a recurrence pass their memory on is unrolled; where it is dynamic,
  the chunks are one operation of a graph for any length, whose gradient computes its forward pass again. How many
  graphs a recipe has, and what they end at, is on its page and in `manyformer show NAME`. They are compared in float64:
  graphs of any length have other chunks, whose sums are rounded in another order.
- **Changed linear layers** ([adapters](how-to/adapters.md), norms, masks, quantized weights) act wherever the model
  computes. They are compared in float64: values at random make roundings of float32 greater than what is compared.
- **Several processes**: weights that several layers share are sharded by `shard_model`
  ([compile, shard, export](how-to/compile-and-export.md)), as torch's `fully_shard` by itself refuses them.

"""


def in_other_tools_page(mark: str) -> str:
    """What each column does, the matrix, and the words of all cells that have some."""
    results: dict[str, dict[str, dict[str, str]]] = json.loads(FILE.read_text(encoding="utf-8"))
    names = sorted(name for name in results if name in RECIPES)
    counts = Counter(cell["result"] for name in names for cell in results[name].values())
    computed = sum(counts.values()) - counts["skipped"]
    lines = [
        mark,
        TEXT,
        *markdown_table(["column", "what is done", "right", "refused", "else"], _sums(results, names)),
        "",
    ]
    shares = ", ".join(f"{counts[result]} {result}" for result in SIGNS if counts[result] and result != "skipped")
    commits = Counter(cell["commit"] for name in names for cell in results[name].values() if "commit" in cell)
    states = ", ".join(f"{count} of {commit}" for commit, count in sorted(commits.items()))
    lines += [f"Of {computed} cells, {shares}; computed at the commits: {states}.", "", "## The matrix", ""]
    rows = [
        [f"`{name}`", *(SIGNS[results[name].get(c, {"result": "skipped"})["result"]] for c in COLUMNS)]
        for name in names
    ]
    lines += markdown_table(["recipe", *COLUMNS], rows)
    lines += ["", "## Remarks", "", *markdown_table(["column", "result", "recipes", "words"], _remarks(results, names))]
    return "\n".join(lines) + "\n"


def _sums(results: dict[str, dict[str, dict[str, str]]], names: list[str]) -> Iterator[list[object]]:
    """What each column does, and how many cells are right, refused and anything else."""
    for column, meaning in COLUMNS.items():
        counts = Counter(results[name][column]["result"] for name in names if column in results[name])
        others = counts.total() - counts["right"] - counts["refused"]
        yield [column, meaning, counts["right"], counts["refused"], others]


def _remarks(results: dict[str, dict[str, dict[str, str]]], names: list[str]) -> Iterator[list[object]]:
    """Cells with the same words together."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for column in COLUMNS:
        for name in names:
            cell = results[name].get(column, {})
            if words := cell.get("words"):
                groups.setdefault((column, cell["result"], words), []).append(name)
    for (column, result, words), recipes in groups.items():
        shown = words.replace("|", "\\|").replace("<", "&lt;").replace("`", "'").replace("_", "\\_").replace("*", "\\*")
        yield [column, result, ", ".join(f"`{name}`" for name in recipes), shown]
