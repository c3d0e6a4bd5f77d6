"""Data sections of a run, one file for each kind of data, and their registry."""

from manyformer.config.data_sections.data_section import (
    DATA_SECTIONS,
    DataSection,
    ExpectedData,
    SectionByKind,
    TokenizedData,
    TokenizerKind,
    register_section,
)

from manyformer.config.data_sections.text_section import TextData  # isort: skip - the order of registration
from manyformer.config.data_sections.pairs_section import PairsData  # isort: skip
from manyformer.config.data_sections.labels_section import LabelsData  # isort: skip
from manyformer.config.data_sections.trees_section import TreesData  # isort: skip
from manyformer.config.data_sections.images_section import ImagesData  # isort: skip
from manyformer.config.data_sections.synthetic_section import SyntheticData  # isort: skip

__all__ = [
    "DATA_SECTIONS",
    "DataSection",
    "ExpectedData",
    "ImagesData",
    "LabelsData",
    "PairsData",
    "SectionByKind",
    "SyntheticData",
    "TextData",
    "TokenizedData",
    "TokenizerKind",
    "TreesData",
    "register_section",
]
