"""Products of the same activations, as those of queries, keys and values, become one operation of a compiled graph.

A step calls an operation for each product, and a call takes as long as a small product.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

import residual_mass.kernels.products  # noqa: F401  (the operations)

ONE = torch.ops.residual_mass.multiply.default
SEVERAL = torch.ops.residual_mass.multiply_several.default


class JoinProducts(CustomGraphPass):
    """A pass over inductor's graph."""

    def __call__(self, graph: Graph) -> None:
        products: dict[Node, list[Node]] = {}
        for node in graph.find_nodes(op="call_function", target=ONE):
            products.setdefault(node.args[0], []).append(node)
        for x, nodes in products.items():
            if len(nodes) > 1:
                join(graph, x, nodes)

    def uuid(self) -> bytes:
        """Returns what inductor's files on disk depend on."""
        return get_hash_for_files((__file__,))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uuid().hex()})"


def join(graph: Graph, x: Node, products: list[Node]) -> None:
    """Replaces products of the activations `x` by parts of one product."""
    weights = [list(each) for each in zip(*(node.args[1:] for node in products), strict=True)]
    rows = weights[3]
    with graph.inserting_before(products[0]):
        whole = called(graph, SEVERAL, x, *weights)
        places = pairwise(accumulate(rows, initial=0))
        parts = [called(graph, torch.ops.aten.slice.Tensor, whole, x.meta["val"].ndim - 1, *each) for each in places]
    for node, part in zip(products, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def called(graph: Graph, operation: torch._ops.OpOverload, *args: object) -> Node:
    """Adds a call to a graph, with what inductor wants to know of its result."""
    node = graph.call_function(operation, args)
    known = torch.utils._pytree.tree_map_only(Node, lambda each: each.meta["val"], args)
    with known[0].fake_mode:
        node.meta["val"] = operation(*known)
    return node
