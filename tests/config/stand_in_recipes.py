"""Small stand-ins for recipes: only signatures and tasks, as the configuration sees them."""

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge

from manyformer.base.errors import UserError, UserErrors, suggest_names
from manyformer.config import RecipeLookup, RunConfig, load_run


class StandInTask(NamedTuple):
    name: str
    data_forms: dict[str, str]

    @property
    def metrics(self) -> dict[str, bool]:
        return {"loss": True, "accuracy": False}

    def data_kinds(self) -> tuple[str, ...]:
        return tuple(self.data_forms)

    def variant(self, data_kind: str) -> "StandInTask":
        return self


def _lm(
    vocab: int = 256,
    dim: int = 64,
    depth: Annotated[int, Ge(1), "number of layers"] = 2,
    heads: int = 4,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    tied: bool = True,
    norm_order: Literal["pre", "post", "sandwich"] = "pre",
    widths: tuple[int, ...] = (1, 2),
    max_length: int = 1024,
) -> None: ...


def _fourier(vocab: int = 256, width: int = 64) -> None: ...


FUNCTIONS = {"lm": _lm, "seq2seq": _lm, "bert": _lm, "classifier": _lm, "fourier": _fourier}
LANGUAGE_MODEL = StandInTask("language-model", {"text": "next-token", "synthetic": "next-token", "images": "levels"})
TASKS = {
    "lm": LANGUAGE_MODEL,
    "seq2seq": StandInTask("translation", {"pairs": "pairs"}),
    "bert": StandInTask("masked-lm", {"text": "masked"}),
    "classifier": StandInTask("classification", {"labels": "labelled"}),
    "fourier": LANGUAGE_MODEL,
}


def signature_of(name: str) -> inspect.Signature:
    if name not in FUNCTIONS:
        raise UserError(f"there is no recipe '{name}'; {suggest_names(name, FUNCTIONS)}")
    return inspect.signature(FUNCTIONS[name])


def load(target: str | Path, *overrides: str) -> RunConfig:
    return load_run(target, overrides, recipes=RecipeLookup(signature_of, TASKS.__getitem__, FUNCTIONS))


def refused(target: str | Path, *overrides: str) -> list[str]:
    """The lines with which a run is refused."""
    try:
        run: Any = load(target, *overrides)
    except UserErrors as error:
        return error.lines
    raise AssertionError(f"accepted: {run!r}")
