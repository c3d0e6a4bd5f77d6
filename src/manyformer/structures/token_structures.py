"""What tokens are nodes of besides a sequence: dependency trees and graphs."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class DependencyTree(NamedTuple):
    """The node of each token in the dependency tree of its document; -1 in all three fields for a token in no tree.

    `depth` counts the edges to the root, `preorder` numbers the nodes of a document's tree in preorder, and
    `last_descendant` is the highest number in the subtree of the token's node: token i is of the same node as j or of
    one of its descendants where preorder_j <= preorder_i <= last_descendant_j.
    `manyformer.structures.dependency_trees.preorder_columns` computes the three from heads."""

    depth: Int[Tensor, "b l"]
    preorder: Int[Tensor, "b l"]
    last_descendant: Int[Tensor, "b l"]


class GraphEdges(NamedTuple):
    """The directed edges of all graphs of a batch, sorted by target (compressed sparse rows).

    Node l of row b has the number b * length + l, and `row_starts[n]` is the index of the first edge that ends at node
    n. An edge carries a message from its source to its target; `features` are vectors of the edges, None for none."""

    sources: Int[Tensor, " edges"]
    targets: Int[Tensor, " edges"]
    row_starts: Int[Tensor, " nodes_and_one"]
    features: Float[Tensor, "edges f"] | None = None
