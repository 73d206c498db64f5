"""Products in a compiled graph: they are called without Python, and those of the same activations, as of queries, keys
and values, by one operation.

A step calls an operation for each product, and a call takes as long as a small product.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from residual_mass.kernels.operations import MOST, product_operations
from residual_mass.kernels.products import kernels_serve

ONE = torch.ops.residual_mass.multiply.default


class JoinProducts(CustomGraphPass):
    """A pass over inductor's graph, in which the number of threads is that of now."""

    def __init__(self) -> None:
        self.operations = product_operations()
        self.threads = torch.get_num_threads()

    def __call__(self, graph: Graph) -> None:
        products: dict[Node, list[Node]] = {}
        for node in graph.find_nodes(op="call_function", target=ONE):
            products.setdefault(node.args[0], []).append(node)
        for nodes in products.values():
            known = nodes[0].args[0].meta["val"]
            if known.is_contiguous() and known.dtype in (torch.float32, torch.bfloat16) and kernels_serve(known):
                for first in range(0, len(nodes), MOST):
                    self.join(graph, nodes[first : first + MOST])

    def join(self, graph: Graph, products: list[Node]) -> None:
        """Replaces products of the same activations by parts of one product."""
        x = products[0].args[0]  # now: it may be a product that was replaced
        operation = self.operations[len(products) - 1]
        weights = [node.args[1:] for node in products]
        rows = [each[3] for each in weights]
        with graph.inserting_before(products[0]):
            parts = [called(graph, operation, x, self.threads, *sum(weights, ()))]
            if len(products) > 1:
                places = pairwise(accumulate(rows, initial=0))
                last = x.meta["val"].ndim - 1
                parts = [called(graph, torch.ops.aten.slice.Tensor, parts[0], last, *each) for each in places]
        for node, part in zip(products, parts, strict=True):
            node.replace_all_uses_with(part)
            graph.erase_node(node)

    def uuid(self) -> bytes:
        """Returns what inductor's files on disk depend on."""
        return get_hash_for_files((__file__,), f"{len(self.operations)} {self.threads}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uuid().hex()})"


def called(graph: Graph, operation: torch._ops.OpOverload, *args: object) -> Node:
    """Adds a call to a graph, with what inductor wants to know of its result."""
    node = graph.call_function(operation, args)
    known = torch.utils._pytree.tree_map_only(Node, lambda each: each.meta["val"], args)
    with known[0].fake_mode:
        node.meta["val"] = operation(*known)
    return node
