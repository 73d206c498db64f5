"""Float64 references that do everything the slow, obvious way: one query, one token at a time, Python floats."""

from __future__ import annotations

import math


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def weighted(tokens, weights, values):
    """Numerator vector and denominator of softmax-like weights over `tokens`."""
    numerator = [math.fsum(weights[i] * values[i][d] for i in tokens) for d in range(len(values[0]))]
    return numerator, math.fsum(weights[i] for i in tokens)


def split(length, sink, tail):
    anchors = [i for i in range(length) if i < sink or i >= length - tail]
    return anchors, [i for i in range(length) if i not in anchors]


def top(scores, mid, k):
    return sorted(mid, key=lambda i: -scores[i])[:k]


def attention(query, keys, values, scale, tokens):
    scores = [scale * dot(query, key) for key in keys]
    shift = max(scores[i] for i in tokens)
    numerator, denominator = weighted(tokens, [math.exp(min(s - shift, 700.0)) for s in scores], values)
    return [x / denominator for x in numerator]


def topk_phi(query, keys, values, scale, sink, tail, k, phi_q, phi_k, subtract=True, generated=((), ())):
    """The paper's rule with S_R, u_R formed token by token; phi_q: list, phi_k: list of lists, all positive floats."""
    scores = [scale * dot(query, key) for key in keys]
    anchors, mid = split(len(keys), sink, tail)
    retrieved = top(scores, mid, k)
    summed = [i for i in mid if not (subtract and i in retrieved)]
    width, features = len(values[0]), len(phi_q)
    state = [[math.fsum(values[i][d] * phi_k[i][m] for i in summed) for m in range(features)] for d in range(width)]
    mass = [math.fsum(phi_k[i][m] for i in summed) for m in range(features)]
    numerator, denominator = weighted(anchors + retrieved, [math.exp(s) for s in scores], values)
    new_keys, new_values = generated
    new_scores = [scale * dot(query, key) for key in new_keys]
    numerator = [
        numerator[d]
        + dot(state[d], phi_q)
        + math.fsum(math.exp(s) * v[d] for s, v in zip(new_scores, new_values, strict=True))
        for d in range(width)
    ]
    denominator += dot(mass, phi_q) + math.fsum(math.exp(s) for s in new_scores)
    return [x / denominator for x in numerator]
