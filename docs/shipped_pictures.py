"""Make the pictures that the repository keeps again: `python docs/shipped_pictures.py`, with names only these."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image

import manyformer as mf
from manyformer.analysis.comparisons.suite_pictures import draw_suite
from manyformer.analysis.comparisons.suite_results import read_results
from manyformer.analysis.contracts.leak_place import DependenceMatrix
from manyformer.analysis.contracts.report_page import matrix_svg
from manyformer.base.files.figures import curve_color, curve_style, panels, write_picture
from manyformer.config import RunConfig
from manyformer.config.shipped import SUITE_RESULTS
from manyformer.nn.positions import AlibiPosition, T5BiasPosition
from manyformer.nn.positions.absolute import sinusoid_table
from manyformer.nn.positions.rotary import rotary_frequencies
from manyformer.training.schedules import make_schedule

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import pictures  # noqa: E402 - a module of this folder

COLORS = 128
BLOCK = 16
TOKENS = 64
WIDTH = 32

VIEWER_RUN = "train lm/stdlib model.dim=64 model.depth=2 model.heads=4 limits.steps=1500 evaluate.every=500"
VIEWER_TEXT = """\
for name, value in items.items():
    if name not in result:
        result[name] = value"""
RANGE_TEST = "train lm/stdlib model.dim=64 model.depth=2 model.heads=4 batch.tokens=2048 --find-lr"
VIEWER_PAGE = f"view runs/lm-stdlib {shlex.quote(VIEWER_TEXT)} --out page.html"


def suite() -> None:
    """The figures of the suite, from the results that come with the package."""
    for path in draw_suite(read_results(SUITE_RESULTS), HERE / "suite"):
        _reduce_colors(path)
        print(f"wrote {path.relative_to(HERE.parent)}")


def viewer() -> None:
    """The page of `manyformer view` for a language model that is trained on the standard library."""
    folder = HERE / "_build/viewer"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "runs/lm-stdlib/result.json").is_file():
        pictures.run(VIEWER_RUN, folder)
    pictures.run(VIEWER_PAGE, folder)
    pictures.photograph(folder / "page.html", [pictures.Screen("viewer.png", 1280, "light")])
    path = HERE / "_static/viewer.png"
    path.write_bytes((folder / "viewer.png").read_bytes())
    _reduce_colors(path)
    print(f"wrote {path.relative_to(HERE.parent)}")


def leak() -> None:
    """Which outputs of a released causal model depend on which tokens: that of README.md."""
    from routing_transformer import RoutingTransformerLM

    torch.manual_seed(0)
    sizes = {"num_tokens": 97, "dim": 64, "depth": 2, "max_seq_len": 256, "heads": 4, "dim_head": 16, "window_size": 16}
    report = mf.check(RoutingTransformerLM(**sizes, causal=True), only=["causal"])
    place = report["causal"].place
    assert place is not None
    assert place.matrix is not None
    path = HERE / "_static" / "leak-released.svg"
    path.write_text(matrix_svg(place.matrix, standalone=True) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(HERE.parent)}")


def bigbird() -> None:
    """Which outputs of BigBird, as transformers releases it as a decoder, change with which blocks of tokens."""
    from transformers import BigBirdConfig, BigBirdForCausalLM

    torch.manual_seed(0)
    blocks = 24
    config = BigBirdConfig(
        is_decoder=True,
        attention_type="block_sparse",
        block_size=BLOCK,
        hidden_size=64,
        # of more layers every output depends on every token, by the global tokens
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        vocab_size=100,
    )
    model = BigBirdForCausalLM(config).double().eval()
    tokens = torch.randint(100, (1, blocks * BLOCK))
    # row b has the tokens of block b exchanged; the last row has none exchanged
    exchanged = tokens.repeat(blocks + 1, 1)
    for block in range(blocks):
        exchanged[block, block * BLOCK : (block + 1) * BLOCK] += 50
    with torch.no_grad():
        logits = model(exchanged % 100).logits
    changes = (logits[:-1] - logits[-1]).abs().amax(-1).unflatten(1, (blocks, BLOCK)).amax(-1)
    rows = (changes.T > 1e-9).tolist()
    matrix = DependenceMatrix(tuple(map(tuple, rows)), bin_size=BLOCK)
    path = HERE / "_static/leak-bigbird.svg"
    path.write_text(matrix_svg(matrix, standalone=True) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(HERE.parent)}: {len(matrix.leaks)} leaks")


def positions() -> None:
    """What encodings of positions add to a token or to the score of a pair, as the package computes it."""
    figure, axes = panels(2, 2, (4.2, 3.0))
    table = sinusoid_table(torch.arange(TOKENS), WIDTH, "halves")
    image = axes[0].imshow(table.T.numpy(), cmap="cividis", aspect="auto", vmin=-1, vmax=1)
    axes[0].grid(visible=False)
    axes[0].set(title="sinusoid: added to the embedding", xlabel="position", ylabel="channel")
    figure.colorbar(image, ax=axes[0], ticks=[-1, 0, 1])
    distances = torch.arange(TOKENS)
    # as RoPE rotates: the score of two equal vectors, pair by pair of channels, by their distance
    for index, frequency in enumerate(rotary_frequencies(WIDTH, 10000.0)[:8:2]):
        turns = torch.cos(distances * frequency)
        axes[1].plot(distances, turns, label=f"pair {2 * index}", **curve_style(index, TOKENS))
    axes[1].set(title="rope: score of equal vectors, by pair", xlabel="distance", ylabel="share of the score")
    for index, slope in enumerate(AlibiPosition(4).slopes.tolist()):
        axes[2].plot(distances, -slope * distances, label=f"head {index}", **curve_style(index, TOKENS))
    axes[2].set(title="alibi: added to the score", xlabel="distance", ylabel="bias", ylim=(-16, 0.5))
    buckets = T5BiasPosition(1, direction="past").bucket_index(-torch.arange(160))
    axes[3].step(range(160), buckets.tolist(), where="post", color=curve_color(0))
    axes[3].set(title="t5: the number that is learned for a distance", xlabel="distance", ylabel="bucket")
    for axis in axes[1:3]:
        # beside the panel, where it covers no line
        axis.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), handlelength=2.4)
    write_picture(figure, HERE / "_static/positions.svg")
    print("wrote docs/_static/positions.svg")


def schedules() -> None:
    """The learning rates of the schedules over a run of 2,000 steps, as the package computes them."""
    figure, axes = panels(1, 2, (4.2, 3.0))
    linear = {"name": "wsd", "decay_share": 0.4}
    wsd = {
        "linear": linear,
        "1-sqrt": {**linear, "shape": "1-sqrt"},
        "exponential to 0.01": {**linear, "shape": "exponential", "final_ratio": 0.01},
        "decay_share=1: linear to zero": {**linear, "decay_share": 1.0},
    }
    others = {"cosine": {"name": "cosine"}, "constant": {"name": "constant"}, "noam": {"name": "noam", "warmup": 200}}
    for axis, group in zip(axes, (wsd, others), strict=True):
        for index, (label, settings) in enumerate(group.items()):
            rate = None if label == "noam" else 1.0
            run = RunConfig.model_validate(
                {"recipe": "llama", "schedule": settings, "optim": {"lr": rate}, "limits": {"steps": 2000}}
            )
            rates = make_schedule(run, width=512).sample(200)
            shares = [value / max(rates) for value in rates]
            axis.plot(range(0, 2000, 10), shares, label=label, **curve_style(index, len(shares)))
        axis.set(xlabel="step", ylabel="share of the highest rate")
        # below the panel, where it covers no line
        axis.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    axes[0].set(title="wsd: the shapes of its decay")
    axes[1].set(title="the others")
    write_picture(figure, HERE / "_static/schedules.svg")
    print("wrote docs/_static/schedules.svg")


def find_lr() -> None:
    """The picture of a learning-rate range test."""
    folder = HERE / "_build/find-lr"
    folder.mkdir(parents=True, exist_ok=True)
    pictures.run(RANGE_TEST, folder)
    path = HERE / "_static/find-lr.png"
    path.write_bytes((folder / "runs/lm-stdlib-find-lr.png").read_bytes())
    _reduce_colors(path)
    print(f"wrote {path.relative_to(HERE.parent)}")


def _reduce_colors(path: Path) -> None:
    """A table of colors in place of three bytes a pixel: drawings have few, and the file is a third of its size."""
    Image.open(path).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


PICTURES: dict[str, Callable[[], None]] = {
    "suite": suite,
    "viewer": viewer,
    "leak": leak,
    "bigbird": bigbird,
    "positions": positions,
    "schedules": schedules,
    "find-lr": find_lr,
}


def main(names: Sequence[str]) -> None:
    """Make the named pictures, or all."""
    for name in names or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
