"""Graphs, for models that label their nodes or each of them as a whole."""

from collections.abc import Container
from typing import Annotated, Literal

from pydantic import Field

from manyformer.config.data_sections.data_section import DataSection, ExpectedData, OpenFraction, register_section
from manyformer.config.section import PathText

ASSUMED_NODES, ASSUMED_FEATURES, ASSUMED_CLASSES = 2708, 1433, 7
"""The assumed numbers of nodes, features of a node and labels, unknown until the data is read: those of Cora."""


@register_section
class GraphsData(DataSection):
    """Graphs, for models that label their nodes or each of them as a whole."""

    kind: Literal["graphs"] = "graphs"
    """Graphs."""
    path: PathText
    """A NumPy archive (.npz) with arrays edges, labels and features, or a text file with the names of two joined nodes
    in each line."""
    nodes: PathText | None = None
    """For edges in a text file: a text file with a node in each line: its name, its features, its label."""
    directed: bool = False
    """Whether an edge joins its nodes in one direction alone; false reads every edge in both."""
    feature_scale: Literal["none", "sum"] = "none"
    """Features as they are, or divided by their sum in each node."""
    laplacian: Annotated[int, Field(ge=0, le=256)] = 0
    """Number of eigenvectors of the graph's Laplacian that are a node's position, for models that read them."""
    valid: OpenFraction = 0.1
    """The fraction of the labelled nodes or graphs held out as validation data, where the archive names none."""

    def expected_keywords(self, parameters: Container[str]) -> ExpectedData:
        keywords = {"features": ASSUMED_FEATURES, "classes": ASSUMED_CLASSES}
        keywords["laplacian"] = self.laplacian
        assumption = f"as if for Cora's {ASSUMED_FEATURES:,} features and {ASSUMED_CLASSES} labels; the data decides"
        expected = {name: keywords[name] for name in keywords if name in parameters}
        return ExpectedData(expected, assumption, ASSUMED_NODES)
