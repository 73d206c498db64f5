"""Triton kernels of a decode step; `gpu.path` launches them and explains how the work is split.

Rows have flat indices: `row` = batch row * Hkv + KV head, `head` = batch row * Hq + query head. No program waits for
another, there are no atomics, and sums have a fixed order, so steps are bitwise reproducible.

With BY_ROW, the query heads of a KV head belong to several methods: each retrieves its own number of tokens, and its
kind says what it adds (`cache.MethodRows`).

Shape letters: B = batch rows, Hq / Hkv = query / KV heads, G = Hq / Hkv, L = prefix columns, T = room for generated
tokens, D = head dimension, M = features, S = shares of one query head, P = parts of the mid-region that have moments,
N = blocks of packed keys, I = inner width of a feature map, C = its terms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from residual_mass.gpu import cache
from residual_mass.gpu.selection import mid_region, retrieved_by, store_maxima

DOT_ROWS = tl.constexpr(16)
"""The fewest query rows that a tensor core multiplies."""
ADDS = tl.constexpr(cache.ADDS_RESIDUAL)
SUBTRACTING = tl.constexpr(cache.SUBTRACTS_RETRIEVED)
CUT = tl.constexpr(cache.ADDS_MOMENTS)


@triton.jit
def score_kernel(
    query,  # [B, Hq, D]
    keys,  # [B, Hkv, L + T, D]
    first,  # [B]
    last,  # [B]
    scores,  # out: [B * Hq, stride], written only at real tokens
    maxima,  # out: [B * Hq, stride / SUB], by `store_maxima`
    scale,
    length,
    columns,  # L + T
    stride,
    generated,  # [1], or None for 0
    sink,
    tail,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes scores of ROWS of the G query heads that share a block of keys, and their maxima."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(first + row // KV_HEADS), tl.load(last + row // KV_HEADS)
    real = ((column >= begin) & (column < end)) | ((column >= length) & (column < length + _count(generated)))
    member = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    head = row * GROUP + member
    width = tl.arange(0, D)
    # Other columns may hold NaN or lie beyond the buffer.
    k = tl.load(keys + (row * columns + column)[:, None] * D + width[None, :], mask=real[:, None], other=0.0)
    q = tl.load(query + head[:, None] * D + width[None, :], mask=(member < GROUP)[:, None], other=0.0)
    product = tl.dot(q.to(DOT_TYPE), tl.trans(k.to(DOT_TYPE)), input_precision="ieee") * scale
    ours = (member < GROUP)[:, None]
    tl.store(scores + head[:, None] * stride + column[None, :], product, mask=ours & real[None, :])
    mid = (column >= begin + sink) & (column < end - tail)
    store_maxima(maxima, head, block, product, member < GROUP, mid, stride, ROWS, BLOCK)


@triton.jit
def scan_kernel(
    query,  # [B, Hq, D]
    codes,  # [B, Hkv, N, D / 2, BLOCK]
    low,  # [B, Hkv, N, D]
    step,  # [B, Hkv, N, D]
    first,  # [B]
    last,  # [B]
    scores,  # out: [B * Hq, stride], written only in the mid-region
    maxima,  # out: [B * Hq, stride / SUB], by `store_maxima`
    scale,
    stride,
    sink,
    tail,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    IN_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes scanned scores of the G query heads that share a block of keys, and their maxima."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(first + row // KV_HEADS) + sink, tl.load(last + row // KV_HEADS) - tail
    mid = (column >= begin) & (column < end)
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, HALF)
    place = row * tl.num_programs(0) + block
    byte = tl.load(codes + (place * HALF + half[:, None]) * BLOCK + tl.arange(0, BLOCK)[None, :])
    member = tl.arange(0, DOT_ROWS)
    ours = member < GROUP
    head = row * GROUP + member
    channel = head[:, None] * D + half[None, :]
    first_q = tl.load(query + channel, mask=ours[:, None], other=0.0).to(tl.float32)
    second_q = tl.load(query + channel + HALF, mask=ours[:, None], other=0.0).to(tl.float32)
    scales = place * D + half
    constant = tl.sum(first_q * tl.load(low + scales).to(tl.float32)[None, :], 1)
    constant += tl.sum(second_q * tl.load(low + scales + HALF).to(tl.float32)[None, :], 1)
    first_q *= tl.load(step + scales).to(tl.float32)[None, :]
    second_q *= tl.load(step + scales + HALF).to(tl.float32)[None, :]
    product = _dot(first_q, (byte & 15).to(DOT_TYPE), DOT_TYPE, IN_TWO)
    product += _dot(second_q, (byte >> 4).to(DOT_TYPE), DOT_TYPE, IN_TWO)
    product = (product + constant[:, None]) * scale
    tl.store(scores + head[:, None] * stride + column[None, :], product, mask=ours[:, None] & mid[None, :])
    store_maxima(maxima, head, block, product, ours, mid, stride, DOT_ROWS, BLOCK)


@triton.jit(do_not_specialize=["k", "most", "rounds"])
def gather_kernel(
    scores,  # [B * Hq, stride], of the keys, unless SCANNED
    query,  # [B, Hq, D], if SCANNED
    keys,  # [B, Hkv, L + T, D], if SCANNED
    values,  # [B, Hkv, L + T, D]
    features,  # [B, Hkv, L, M], if SUBTRACTS
    log_query,  # [TERMS, B, Hq, M], if SUBTRACTS
    log_shift,  # [B, Hkv, M], if SUBTRACTS
    first,
    last,
    chosen,  # [B * Hq, most] columns, as many as the mid-region has
    kinds,  # [G], if BY_ROW
    sums,  # out: [2, B * Hq, S, D + 1] exact terms in units of e^shift, and the retrieved tokens' share of S and u
    shifts,  # out: [B * Hq, S], -inf for a share without tokens
    shares,  # S
    scale,
    length,
    columns,  # L + T
    stride,
    k,  # a number or, BY_ROW, [B, G]
    most,  # the largest k
    generated,  # [1], or None for 0
    rounds,  # slots of one program, in units of SLOTS
    sink,
    tail,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TERMS: tl.constexpr,
    MAX_TERMS: tl.constexpr,  # TERMS, rounded up to a power of two
    SCANNED: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    BY_ROW: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Sums a share of a query head's exact support. Slots: k retrieved tokens, then anchors, then generated tokens."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = head // GROUP
    begin, end = mid_region(first, last, head // HEADS, sink, tail)
    chosen += head * most
    k = retrieved_by(k, head, HEADS, GROUP, BY_ROW)
    generated = _count(generated)
    scores += head * stride
    values += row * columns * D
    width = tl.arange(0, D)
    if SCANNED:
        keys += row * columns * D
        q = tl.load(query + head * D + width).to(tl.float32)
    if SUBTRACTS:
        features += row * length * M
        phi_query, _ = _query_features(log_query, log_shift, head, row, tl.num_programs(1), M, TERMS, MAX_TERMS)

    shift = -float("inf")
    mass, share_mass = 0.0, 0.0
    numerator, share = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    begin_slot = split * rounds * SLOTS
    if BY_ROW:
        kind = tl.load(kinds + head % GROUP)
    # A row that retrieves few tokens, and a buffer with much room, have no slots in most shares.
    rounds = tl.minimum(rounds, tl.cdiv(tl.maximum(k + sink + tail + generated - begin_slot, 0), SLOTS))
    for i in range(rounds):
        slot = begin_slot + i * SLOTS + tl.arange(0, SLOTS)
        retrieved = slot < tl.minimum(k, end - begin)
        column = tl.load(chosen + slot, mask=retrieved, other=0)
        # In a short row the two ends overlap: sinks end at its last token, tails start after the sinks.
        sinks = slot - k
        tails = slot - k - sink
        new = tails - tail
        is_sink = (sinks >= 0) & (sinks < sink) & (begin - sink + sinks < end + tail)
        is_tail = (tails >= 0) & (tails < tail) & (end + tails >= begin)
        is_new = (new >= 0) & (new < generated)
        column = tl.where(is_sink, begin - sink + sinks, column)
        column = tl.where(is_tail, end + tails, column)
        column = tl.where(is_new, length + new, column)
        valid = retrieved | is_sink | is_tail | is_new

        place = column[:, None] * D + width[None, :]
        if SCANNED:
            key = tl.load(keys + place, mask=valid[:, None], other=0.0).to(tl.float32)
            score = tl.where(valid, tl.sum(key * q[None, :], 1) * scale, -float("inf"))
        else:
            score = tl.load(scores + column, mask=valid, other=-float("inf"))
        value = tl.load(values + place, mask=valid[:, None], other=0.0).to(tl.float32)
        highest = tl.maximum(shift, tl.max(score, 0))
        unit = tl.where(highest > -float("inf"), highest, 0.0)
        weight = tl.exp(score - unit)
        rescale = tl.exp(shift - unit)
        mass = mass * rescale + tl.sum(weight, 0)
        numerator = numerator * rescale + tl.sum(weight[:, None] * value, 0)
        shift = highest
        if SUBTRACTS:
            feature = tl.arange(0, M)
            if BY_ROW:
                retrieved &= kind & SUBTRACTING != 0
            phi = tl.load(features + column[:, None] * M + feature[None, :], mask=retrieved[:, None], other=0.0)
            z = tl.sum(phi.to(tl.float32) * phi_query[None, :], 1)
            share_mass += tl.sum(z, 0)
            share += tl.sum(z[:, None] * value, 0)

    out = head * shares + split
    tl.store(shifts + out, shift)
    _store_terms(sums, out, numerator, mass, D)
    if SUBTRACTS:
        _store_terms(sums, out + tl.num_programs(1).to(tl.int64) * shares, share, share_mass, D)


@triton.jit(do_not_specialize=["k", "num_members"])
def moments_kernel(
    query,  # [B, Hq, D]
    least,  # [B * Hq]
    count,  # [B, Hkv, P]
    mean_key,  # [B, Hkv, P, D]
    mean_value,  # [B, Hkv, P, D]
    key_covariance,  # [B, Hkv, P, D, D], or [B, Hkv, 1, D, D] if SHARED
    value_key_covariance,  # same shape
    spread,  # [B, Hkv, P]
    first,
    last,
    sums,  # out: [2, B * Hq, S, D + 1], shares after those of the tokens
    shifts,  # out: [B * Hq, S], -inf where no token is unread
    shares,  # S
    before,  # shares of the tokens
    parts,  # P
    rounds,  # parts of one program
    scale,
    k,  # a number or, BY_ROW, [B, G]
    members,  # [N] indices below G of the query heads that these moments belong to, if BY_ROW
    num_members,  # N
    least_variance,
    whole,
    sink,
    tail,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    BY_ROW: tl.constexpr,
):
    """Terms of a query head's unread tokens, estimated from moments of some parts (`core.moments.truncated_terms`)."""
    program, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if BY_ROW:
        head = head // num_members * GROUP + tl.load(members + head % num_members)
    k = retrieved_by(k, head, HEADS, GROUP, BY_ROW)
    row = head // GROUP
    begin, end = mid_region(first, last, head // HEADS, sink, tail)
    left = end - begin > k
    threshold = tl.load(least + head, mask=left, other=0.0)
    width = tl.arange(0, D)
    tile = width[:, None] * D + width[None, :]
    q = tl.load(query + head * D + width).to(tl.float32) * scale
    if SHARED:
        shared_variance = tl.sum(tl.sum(tl.load(key_covariance + row * D * D + tile) * q[None, :], 1) * q, 0)
        shared_slope = tl.sum(tl.load(value_key_covariance + row * D * D + tile) * q[None, :], 1)

    shift, mass = -float("inf"), 0.0
    numerator = tl.zeros([D], tl.float32)
    for i in range(rounds):
        part = program * rounds + i
        place = row * parts + tl.minimum(part, parts - 1)
        if SHARED:
            variance, slope = shared_variance, shared_slope
        else:
            variance = tl.sum(tl.sum(tl.load(key_covariance + place * D * D + tile) * q[None, :], 1) * q, 0)
            slope = tl.sum(tl.load(value_key_covariance + place * D * D + tile) * q[None, :], 1)
        factor = tl.load(spread + place)
        mean = tl.sum(tl.load(mean_key + place * D + width) * q, 0)
        log_mass, along = _cut(mean, tl.maximum(factor * variance, least_variance), threshold, whole)
        tokens = tl.load(count + place, mask=left & (part < parts), other=0.0)
        own = tl.where(tokens > 0, log_mass + tl.log(tl.maximum(tokens, 1.0)), -float("inf"))
        highest = tl.maximum(shift, own)
        unit = tl.where(highest > -float("inf"), highest, 0.0)
        weight, rescale = tl.exp(own - unit), tl.exp(shift - unit)
        mass = mass * rescale + weight
        value = tl.load(mean_value + place * D + width) + along * factor * slope
        numerator = numerator * rescale + weight * value
        shift = highest

    out = head * shares + before + program
    tl.store(shifts + out, shift)
    _store_terms(sums, out, numerator, mass, D)


@triton.jit
def merge_kernel(
    sums,  # [2, B * Hq, S, D + 1]
    shifts,  # [B * Hq, S]
    summary,  # [B, Hkv, M, D + 1], if RESIDUAL
    log_query,  # [TERMS, B, Hq, M], if RESIDUAL
    log_shift,  # [B, Hkv, M], if RESIDUAL
    out,  # [B, Hq, D]
    masses,  # out: [B, Hq] denominators, if BY_ROW: then `out` holds numerators, both in units of e^units
    units,  # out: [B, Hq], if BY_ROW
    kinds,  # [G], if BY_ROW
    shares,  # S
    before,  # shares of the tokens
    clamp,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TERMS: tl.constexpr,
    MAX_TERMS: tl.constexpr,  # TERMS, rounded up to a power of two
    RESIDUAL: tl.constexpr,
    SUBTRACTS: tl.constexpr,
    BY_ROW: tl.constexpr,
    MAX_SHARES: tl.constexpr,  # S, rounded up to a power of two
):
    """Adds up all shares of a query head and its residual, and divides once unless BY_ROW."""
    head = tl.program_id(0).to(tl.int64)
    row = head // GROUP
    share, width = tl.arange(0, MAX_SHARES), tl.arange(0, D)
    used = share < shares
    if BY_ROW:
        kind = tl.load(kinds + head % GROUP)
        used &= (share < before) | (kind & CUT != 0)
    terms = sums + (head * shares + share) * (D + 1)
    own = tl.load(shifts + head * shares + share, mask=used, other=-float("inf"))
    top = tl.max(own, 0)
    unit = tl.where(top > -float("inf"), top, 0.0)
    scale = tl.exp(own - unit)
    mass = tl.sum(tl.load(terms + D, mask=used, other=0.0) * scale, 0)
    numerator = tl.load(terms[:, None] + width[None, :], mask=used[:, None], other=0.0)
    numerator = tl.sum(numerator * scale[:, None], 0)
    if RESIDUAL:
        phi_query, phi_shift = _query_features(log_query, log_shift, head, row, tl.num_programs(0), M, TERMS, MAX_TERMS)
        state = summary + (row * M + tl.arange(0, M)) * (D + 1)
        whole = tl.sum(phi_query * tl.load(state + D), 0)
        left = whole
        estimate = tl.sum(phi_query[:, None] * tl.load(state[:, None] + width[None, :]), 0)
        if SUBTRACTS:
            terms += tl.num_programs(0).to(tl.int64) * shares * (D + 1)
            left -= tl.sum(tl.load(terms + D, mask=used, other=0.0), 0)
            estimate -= tl.sum(tl.load(terms[:, None] + width[None, :], mask=used[:, None], other=0.0), 0)
        # Choose the common unit after the clamp: a dropped residual must not make e^s underflow.
        kept = (left <= clamp * whole) == 0  # negated, so that NaN is kept and not dropped silently
        if BY_ROW:
            kept &= kind & ADDS != 0
        common = tl.where(kept, tl.maximum(top, phi_shift), unit)
        residual = tl.where(kept, tl.exp(phi_shift - common), 0.0)
        exact = tl.exp(top - common)
        unit = common
        mass = mass * exact + tl.where(kept, residual * left, 0.0)
        numerator = numerator * exact + tl.where(kept, residual * estimate, 0.0)
    if BY_ROW:
        tl.store(out + head * D + width, numerator)
        tl.store(masses + head, mass)
        tl.store(units + head, unit)
    else:
        tl.store(out + head * D + width, numerator / mass)


@triton.jit
def map_kernel(
    query,  # [B, Hq, D]
    a,  # [Hq, D, M]
    b,  # [Hq, I, M]
    c,  # [Hq, D, I]
    c_bias,  # [Hq, I]
    e_bias,  # [Hq, M]
    terms,  # out: [C, B, Hq, M]
    batch,
    inner,  # I
    D: tl.constexpr,
    M: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one head's term of log phi(x) = A x + B gelu(C x + c) + e (`FoldedMap`) for a block of inner channels;
    the first block adds A x + e.
    """
    block, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    width, feature = tl.arange(0, D), tl.arange(0, M)
    channel = block * BLOCK + tl.arange(0, BLOCK)
    used = channel < inner
    up = tl.load(c + (head * D + width)[:, None] * inner + channel[None, :], mask=used[None, :], other=0.0)
    down = tl.load(b + (head * inner + channel)[:, None] * M + feature[None, :], mask=used[:, None], other=0.0)
    linear = tl.load(a + (head * D + width)[:, None] * M + feature[None, :], mask=block == 0, other=0.0)
    inner_bias = tl.load(c_bias + head * inner + channel, mask=used, other=0.0)
    bias = tl.load(e_bias + head * M + feature, mask=block == 0, other=0.0)
    for start in range(0, batch, DOT_ROWS):
        row = start + tl.arange(0, DOT_ROWS)
        place = row * heads + head
        x = tl.load(query + place[:, None] * D + width[None, :], mask=(row < batch)[:, None], other=0.0).to(DOT_TYPE)
        z = tl.dot(x, up.to(DOT_TYPE), input_precision="ieee") + inner_bias[None, :]
        z = 0.5 * z * (1 + tl.erf(0.70710678 * z))
        term = tl.dot(z.to(DOT_TYPE), down.to(DOT_TYPE), input_precision="ieee") + bias[None, :]
        term += tl.dot(x, linear.to(DOT_TYPE), input_precision="ieee")
        out = (block * batch * heads + place)[:, None] * M + feature[None, :]
        tl.store(terms + out, term, mask=(row < batch)[:, None])


@triton.jit
def _count(generated):
    """Returns the number of generated tokens."""
    return 0 if generated is None else tl.load(generated)


@triton.jit
def _dot(x, codes, DOT_TYPE: tl.constexpr, IN_TWO: tl.constexpr):
    """Multiplies x with codes. IN_TWO splits x into two bfloat16 numbers, exactly if x is a product of two of them."""
    high = x.to(DOT_TYPE)
    product = tl.dot(high, codes, input_precision="ieee")
    if IN_TWO:
        product += tl.dot((x - high.to(tl.float32)).to(DOT_TYPE), codes, input_precision="ieee")
    return product


@triton.jit
def _store_terms(sums, place, numerator, mass, D: tl.constexpr):
    tl.store(sums + place * (D + 1) + tl.arange(0, D), numerator)
    tl.store(sums + place * (D + 1) + D, mass)


@triton.jit
def _cut(mean, variance, threshold, whole):
    """Same as `core.moments._cut`."""
    deviation = tl.sqrt(variance)
    distance = tl.minimum((threshold - mean) / deviation, deviation + whole)
    tail = _erfcx(0.70710678 * (deviation - distance))
    return mean + distance * (deviation - 0.5 * distance) + tl.log(0.5 * tail), 1 - 0.79788456 / (tail * deviation)


@triton.jit
def _erfcx(x):
    """Returns e^(x^2) erfc(x) for x above -9: a polynomial in t = 2 / (2 + |x|) that we fitted at Chebyshev's nodes, to
    2e-8 of the value before it is rounded.
    """
    t = 2 / (2 + tl.abs(x))
    p = 0.0431730659 * t - 0.234605491
    p = (p * t + 0.493385742) * t - 0.454563718
    p = (p * t + 0.13185004) * t - 0.0590509099
    p = (p * t + 0.0934147485) * t + 0.175324075
    p = (p * t + 0.24688388) * t + 0.282093777
    tail = (p * t + 0.282094795) * t
    below = tl.minimum(x, 0.0)
    return tl.where(x < 0, 2 * tl.exp(below * below) - tail, tail)


@triton.jit
def _query_features(
    log_query, log_shift, head, row, heads, M: tl.constexpr, TERMS: tl.constexpr, MAX_TERMS: tl.constexpr
):
    """Returns phi_q [M] in units of e^shift, and that shift; `heads` are those of all batch rows."""
    feature, term = tl.arange(0, M), tl.arange(0, MAX_TERMS)
    terms = log_query + (term[None, :] * heads + head) * M + feature[:, None]
    log_weights = tl.sum(tl.load(terms, mask=term[None, :] < TERMS, other=0.0), 1)
    log_weights += tl.load(log_shift + row * M + feature)
    shift = tl.max(log_weights, 0)
    return tl.exp(log_weights - shift), shift
