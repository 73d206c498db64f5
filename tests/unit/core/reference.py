"""Float64 references that do everything the slow, obvious way: one query, one token at a time, Python floats."""

from __future__ import annotations

import math


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def weighted(tokens, weights, values):
    """Numerator vector and denominator of softmax-like weights over `tokens`."""
    numerator = [math.fsum(weights[i] * values[i][d] for i in tokens) for d in range(len(values[0]))]
    return numerator, math.fsum(weights[i] for i in tokens)


def log_normal_cdf(a):
    """log Phi(a); far below zero the first terms of its asymptotic series."""
    if a > -30:
        return math.log(0.5 * math.erfc(-a / math.sqrt(2)))
    return -a * a / 2 - math.log(-a * math.sqrt(2 * math.pi)) + math.log1p(-1 / a**2 + 3 / a**4)


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


def topk_moments(query, keys, values, scale, sink, tail, k, parts, shared=False, generated=((), ())):
    """Truncated moments of the mid-region in parts, given as lists of its tokens."""
    scores = [scale * dot(query, key) for key in keys]
    anchors, mid = split(len(keys), sink, tail)
    retrieved = top(scores, mid, k)
    new_keys, new_values = generated
    read = [(scores[i], values[i]) for i in anchors + retrieved]
    read += [(scale * dot(query, key), value) for key, value in zip(new_keys, new_values, strict=True)]
    if len(retrieved) < len(mid):
        tau = min(scores[i] for i in retrieved) if retrieved else max(scores[i] for i in mid)
        moments = [part_moments(part, scores, keys, values) for part in parts if part]
        if shared:
            moments = shared_moments(moments)
        read += [truncated(*part[:5], tau) for part in moments]
    shift = max(score for score, _ in read)
    weights = [math.exp(score - shift) for score, _ in read]
    numerator, denominator = weighted(range(len(read)), weights, [value for _, value in read])
    return [x / denominator for x in numerator]


def part_moments(part, scores, keys, values):
    """Number of tokens, mean score and value, variance of scores, covariance of scores and values, variance of keys."""
    n, m = len(part), math.fsum(scores[i] for i in part) / len(part)
    value, key = ([math.fsum(x[i][d] for i in part) / n for d in range(len(x[0]))] for x in (values, keys))
    variance = math.fsum((scores[i] - m) ** 2 for i in part) / n
    slope = [math.fsum((scores[i] - m) * (values[i][d] - value[d]) for i in part) / n for d in range(len(value))]
    trace = math.fsum((keys[i][d] - key[d]) ** 2 for i in part for d in range(len(key))) / n
    return n, m, value, variance, slope, trace


def shared_moments(moments):
    """The same with the covariances of all parts together, scaled to each part's variance of keys."""
    total = sum(n for n, *_ in moments)
    variance = math.fsum(n * variance for n, _, _, variance, _, _ in moments) / total
    slope = [math.fsum(part[0] * part[4][d] for part in moments) / total for d in range(len(moments[0][2]))]
    trace = math.fsum(part[0] * part[5] for part in moments) / total
    spreads = [part[5] / max(trace, 1e-8) for part in moments]
    return [
        (n, m, value, spread * variance, [spread * x for x in slope], spread * trace)
        for (n, m, value, *_), spread in zip(moments, spreads, strict=True)
    ]


def truncated(n, m, value, variance, slope, tau):
    """Log mass and mean value of Gaussian scores below tau, and of values linear in them."""
    s = math.sqrt(max(variance, 1e-8))
    a = (tau - m) / s - s
    log_below = log_normal_cdf(a)
    ratio = math.exp(-a * a / 2 - math.log(2 * math.pi) / 2 - log_below)
    return math.log(n) + m + s * s / 2 + log_below, [x + b * (1 - ratio / s) for x, b in zip(value, slope, strict=True)]
