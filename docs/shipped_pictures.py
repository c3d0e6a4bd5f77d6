"""Make the pictures that the repository keeps again: `python docs/shipped_pictures.py`, with names only these."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image

import manyformer as mf
from manyformer.analysis.comparisons.advise import read_results
from manyformer.analysis.comparisons.suite_pictures import draw_suite
from manyformer.analysis.contracts.report_page import matrix_svg
from manyformer.config.shipped import SUITE_RESULTS

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import pictures  # noqa: E402 - a module of this folder

COLORS = 128

VIEWER_RUN = "train lm/stdlib model.dim=64 model.depth=2 model.heads=4 limits.steps=1500 evaluate.every=500"
VIEWER_TEXT = """\
for name, value in items.items():
    if name not in result:
        result[name] = value"""
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


def _reduce_colors(path: Path) -> None:
    """A table of colors in place of three bytes a pixel: drawings have few, and the file is a third of its size."""
    Image.open(path).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


PICTURES: dict[str, Callable[[], None]] = {"suite": suite, "viewer": viewer, "leak": leak}


def main(names: Sequence[str]) -> None:
    """Make the named pictures, or all."""
    for name in names or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
