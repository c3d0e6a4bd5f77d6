"""Kinds of data from outside: registered once, validated by their section, opened, scored and refused like ours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from manyformer.base.errors import UserError
from manyformer.config import DATA_SECTIONS, DataSection, RunConfig, TextData, json_schema
from manyformer.config.data_sections import MarkovData
from manyformer.config.setting_layers import SettingLayer
from manyformer.config.validation_errors import validate
from manyformer.data import open_data, open_file, open_held_out
from manyformer.data.pipeline.kind import DataKind, OpenRequest, data_kinds, kind_of, register
from manyformer.data.pipeline.opened import EvaluationData, EvaluationPath, OpenedData
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair


class NumbersData(DataSection):
    """Sequences of a rule under another name."""

    kind: Literal["numbers"] = "numbers"
    """Numbers."""
    count: int = 3
    """How many."""


RULE = MarkovData(length=8, valid=64)


def _open(data: NumbersData, form: str, request: OpenRequest) -> OpenedData:
    return kind_of(RULE).open(RULE, form, request)


def _held_out(data: NumbersData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    return kind_of(RULE).held_out(RULE, form, request, split)


def _from_file(
    data: NumbersData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    return EvaluationData(str(path), None)


NUMBERS = DataKind(section=NumbersData, forms=("next-token",), open=_open, held_out=_held_out, from_file=_from_file)


@pytest.fixture
def numbers() -> Iterator[DataKind[NumbersData]]:
    yield register(NUMBERS)
    del DATA_SECTIONS["numbers"]


def complaints(**data: Any) -> list[str]:
    return [str(error) for error in validate(SettingLayer({"recipe": "x", "data": data}), None)[1]]


def test_a_registered_kind_is_validated_listed_and_opened(numbers: DataKind[NumbersData], tmp_path: Path) -> None:
    run = RunConfig.model_validate({"recipe": "x", "data": {"kind": "numbers", "count": 5}})
    assert isinstance(run.data, NumbersData)
    assert run.model_dump()["data"] == {"kind": "numbers", "count": 5}
    assert RunConfig.model_validate(run.model_dump(by_alias=True)) == run
    assert "numbers" in json_schema()["properties"]["data"]["discriminator"]["mapping"]
    assert complaints(kind="numbers", cuont=5) == ["data.cuont: no such setting; did you mean data.count?"]
    assert data_kinds()["numbers"] is numbers
    assert open_data(run.data, "next-token", batch_tokens=64, cache=tmp_path, seed=0).required_keywords == {"vocab": 17}
    request = OpenRequest(64, tmp_path)
    assert open_held_out(run.data, "next-token", request, None).name == "test"
    tokenizers = open_data(RULE, "next-token", batch_tokens=64, cache=tmp_path, seed=0).tokenizers
    assert open_file(run.data, "next-token", tokenizers, "a.txt", request).name == "a.txt"


def test_a_kind_is_unknown_until_it_is_registered() -> None:
    assert complaints(kind="numbers") == [
        "data.kind: 'numbers' is not one of text, pairs, labels, sentence-pairs, questions, trees, images, "
        "synthetic, trajectories, environment, "
        "graphs, audio, modalities"
    ]


def test_a_kind_is_registered_once(numbers: DataKind[NumbersData]) -> None:
    class OtherNumbers(NumbersData):
        pass

    other = DataKind(section=OtherNumbers, forms=("next-token",), open=_open, held_out=_held_out, from_file=_from_file)
    with pytest.raises(UserError, match=r"data\.kind=numbers is defined in .* and in .*; rename one"):
        register(other)
    copy = DataKind(section=NumbersData, forms=("levels",), open=_open, held_out=_held_out, from_file=_from_file)
    with pytest.raises(UserError, match=r"data\.kind=numbers is registered twice"):
        register(copy)


def test_a_split_or_form_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no split 'vaild' to score; did you mean valid"):
        open_held_out(RULE, "next-token", OpenRequest(64, tmp_path), "vaild")
    with pytest.raises(UserError, match="data of kind text has no form 'next-tokn'; did you mean next-token"):
        open_data(TextData(), "next-tokn", batch_tokens=64, cache=tmp_path, seed=0)


def test_a_setting_may_be_named_like_a_kind() -> None:
    assert complaints(kind="labels", path="x.tsv", text=-1) == [
        "data.text: must be a column's name, or its number counted from 0, got -1"
    ]
