"""One HTML file that shows what models compute for a text: it needs no network and runs no code but its own."""

import base64
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from manyformer.analysis.figures.token_work import IdTokenizer, TextOrIds, ids_of
from manyformer.analysis.viewer.model_view import ModelView, deflate, view_image, view_text
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write_text
from manyformer.base.files.json_text import json_text
from manyformer.base.type_aliases import ImageArray
from manyformer.models import Model

NOTEBOOK_HEIGHT = 760

LIVE_PROGRAM = "live.js"

PROGRAM = ("page.js", "drawings.js", "pictures.js", "start.js")
"""The files of the page's program, in the order in which they run; the page contains them and its style compressed."""


@dataclass(frozen=True)
class AttentionPage:
    """A page as the text of one HTML file; a notebook shows it below the cell."""

    html: str

    def save(self, path: str | Path) -> None:
        """Write the page; an existing file is replaced atomically. Raises UserError unless it ends in .html."""
        if Path(path).suffix != ".html":
            raise UserError(f"{path} must end in .html, because that is what is written")
        atomic_write_text(Path(path), self.html)

    def _repr_html_(self) -> str:
        # a frame of its own origin: neither the page nor the notebook can read the other
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="Attention" '
            f'style="width: 100%; height: {NOTEBOOK_HEIGHT}px; border: 0"></iframe>'
        )


def view(
    model: Model | Mapping[str, Model], text: TextOrIds | ImageArray, answer: TextOrIds | None = None
) -> AttentionPage:
    """A page that shows what `model`, or several models by name, compute for `text`, in a notebook or saved as a file.

    `text` may be token ids, which a model without a tokenizer needs; models of images get an image (h, w, c) of bytes.
    The page shows the attention of every head and the computation per token. The target of an encoder-decoder is
    `answer`, or its own translation. Raises UserError for a model that cannot read the input, or has nothing to show.
    """
    models = model if isinstance(model, Mapping) else {"": model}
    if isinstance(text, np.ndarray) and text.ndim > 1:
        return AttentionPage(
            render_page([view_image(viewed_model, text, name=name) for name, viewed_model in models.items()])
        )
    # an array of one row holds ids
    words: TextOrIds = text.tolist() if isinstance(text, np.ndarray) else text
    views = [view_text(viewed_model, words, answer, name=name) for name, viewed_model in models.items()]
    shown = words if isinstance(words, str) else IdTokenizer().decode(ids_of(words))
    return AttentionPage(render_page(views, text=shown))


def render_page(views: Sequence[ModelView], *, text: str = "") -> str:
    """A complete page with these models side by side; `text` is what they read.

    The page contains its script, its style and its data, and its policy permits exactly these: no other script runs,
    and nothing is requested. Text of the models and of the user is data, never markup.
    """
    return _fill_template({"text": text, "runs": [view.as_json() for view in views]}, PROGRAM, connect="'none'")


def render_live_page(page_data: dict[str, Any]) -> str:
    """The page of a server, which asks the server that it came from, and no other, for the views of other texts."""
    return _fill_template({**page_data, "live": True}, (*PROGRAM[:-1], LIVE_PROGRAM, PROGRAM[-1]), connect="'self'")


def _fill_template(page_data: dict[str, Any], program_parts: Sequence[str], *, connect: str) -> str:
    """The page's template with its parts; `connect` is where the page may send requests to."""
    # hashes are those of what stands in the page: the texts after the removal, before compression
    style = _remove_indentation(_read_part("page.css"))
    loader = _remove_indentation(_read_part("loader.js"))
    program = _remove_indentation("".join(map(_read_part, program_parts)))
    policy = (
        f"default-src 'none'; script-src '{_sha256(loader)}' '{_sha256(program)}'; style-src '{_sha256(style)}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        # compressed parts are put in place by the loader, so that a page of 16 heads stays small
        "style": deflate(style.encode()),
        "data": json_for_script(page_data),
        "program": deflate(program.encode()),
        "loader": loader,
    }
    # one pass over the template: a value that contains a placeholder's name stays as it is
    return re.sub(r"\{\{(.*?)\}\}", lambda placeholder: parts[placeholder[1]], _read_part("page.html"))


def json_for_script(value: Any) -> str:
    """JSON that is safe inside of a script element: it contains neither markup nor line separators of JavaScript."""
    return json_text(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")


def _read_part(name: str) -> str:
    return files("manyformer.analysis.viewer").joinpath(name).read_text(encoding="utf-8")


def _remove_indentation(source: str) -> str:
    """Source code without indentation and comment lines, which have no meaning in a script or a style."""
    unindented = re.sub(r"^[ ]+", "", source, flags=re.MULTILINE)
    return re.sub(r"^(//.*|/\*\*.*\*/)\n", "", unindented, flags=re.MULTILINE)


def _sha256(text: str) -> str:
    """The hash by which a content security policy permits an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
