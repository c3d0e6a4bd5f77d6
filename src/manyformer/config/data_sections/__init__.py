"""Data sections of a run and their registry; the order of the imports is that of registration."""

from manyformer.config.data_sections.data_section import DATA_SECTIONS, DataSection, SectionByKind, register_section

from manyformer.config.data_sections.tokenized_sections import (  # isort: skip
    LabelsData,
    PairsData,
    TextData,
    TokenizedData,
    TreesData,
)
from manyformer.config.data_sections.images_section import ImagesData  # isort: skip
from manyformer.config.data_sections.synthetic_section import SyntheticData  # isort: skip
from manyformer.config.data_sections.trajectories_section import TrajectoriesData  # isort: skip
from manyformer.config.data_sections.environment_section import EnvironmentData  # isort: skip
from manyformer.config.data_sections.graphs_section import GraphsData  # isort: skip

__all__ = [
    "DATA_SECTIONS",
    "DataSection",
    "EnvironmentData",
    "GraphsData",
    "ImagesData",
    "LabelsData",
    "PairsData",
    "SectionByKind",
    "SyntheticData",
    "TextData",
    "TokenizedData",
    "TrajectoriesData",
    "TreesData",
    "register_section",
]
