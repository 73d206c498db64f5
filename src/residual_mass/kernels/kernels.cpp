// What `library.py` calls, for the head dimensions of `with_width`.
#include "full.hpp"
#include "pack.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Calls f with the width as a constant, and returns what it returns; -1 for a width that is not served.
template <class F>
static int64_t with_width(int width, F f) {
  switch (width) {
    case 32: return f.template operator()<32>();
    case 64: return f.template operator()<64>();
    case 80: return f.template operator()<80>();
    case 96: return f.template operator()<96>();
    case 112: return f.template operator()<112>();
    case 128: return f.template operator()<128>();
    case 192: return f.template operator()<192>();
    case 256: return f.template operator()<256>();
    default: return -1;
  }
}

// What `library.py` asks for: another number whenever the meaning of an argument or of `Layer` changes.
EXPORT int layout() { return 3; }

// Whether heads of this dimension are served.
EXPORT int serves(int width) {
  return with_width(width, []<int D>() -> int64_t {
    static_assert(D % 16 == 0, "vectors of 16 floats, and rows of low planes that end with half of 16 bytes at least");
    return 1;
  }) == 1;
}

// The best target of this CPU: 2 for AVX-512 with VNNI, 1 for AVX2, 0 for any.
EXPORT int target() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx2 ? 1 + (wide && __builtin_cpu_supports("avx512vnni")) : 0;
#else
  return 0;
#endif
}

// Bytes of scratch that a step needs at most, of any cache.
EXPORT int64_t scratch_bytes(const Layer* layer) {
  return with_width(layer->width, [&]<int D>() -> int64_t {
    return std::max(scratch_of(*layer).bytes(layer->threads), FullStep<Eight, D>{*layer}.bytes());
  });
}

// Attention of one token per row. bits: 4 over planes (keys, scales, rows, clusters), 8, or 16 for bfloat16.
EXPORT int64_t step(const Layer* layer, int bits) {
  return with_width(layer->width, [&]<int D>() -> int64_t {
    if (bits == 4) Step<D>{*layer}.run();
    else if (bits == 8) FullStep<Eight, D>{*layer}.run();
    else FullStep<Bfloat16, D>{*layer}.run();
    return 0;
  });
}

// Full attention of the last T tokens, of planes with both read: as many bytes of scratch, and the attention.
EXPORT int64_t attend_bytes(const Layer* layer) {
  return with_width(layer->width, [&]<int D>() -> int64_t { return FullStep<Planes, D>{*layer}.bytes(); });
}
EXPORT int64_t attend(const Layer* layer, int bits) {
  return with_width(layer->width, [&]<int D>() -> int64_t {
    if (bits == 4) FullStep<Planes, D>{*layer}.run();
    else if (bits == 8) FullStep<Eight, D>{*layer}.run();
    else FullStep<Bfloat16, D>{*layer}.run();
    return 0;
  });
}

// Packs n tokens of `units` KV heads, keys and values [units, length, D]; order [units, n] or null. The targets start at
// the first block to write, and each unit has `blocks`.
EXPORT int64_t pack(int64_t width, int64_t bits, int64_t threads, int64_t units, int64_t length, int64_t n, int64_t blocks, const float* keys, const float* values,
                    const int32_t* order, uint8_t* to_keys, bf16* scales, uint8_t* to_values, float* value_scales) {
  return with_width(width, [&]<int D>() -> int64_t {
    parallel(threads, units, [&](int u, int) {
      const size_t from = (size_t)u * length * D, block = (size_t)u * blocks;
      const Tokens tokens{keys + from, values + from, order ? order + (size_t)u * n : nullptr, (int)n};
      if (bits == 4) pack_planes<D>(tokens, to_keys + block * (BLOCK * D / 2), scales + block * 2 * D, to_values + block * BLOCK * (D / 2 + D + 2));
      else if (bits == 8) pack_eight<D>(tokens, to_keys + block * BLOCK * D, scales + block * 2 * D, to_values + block * BLOCK * D, value_scales + block * BLOCK);
      else pack_bfloat16<D>(tokens, to_keys + block * 2 * BLOCK * D, to_values + block * 2 * BLOCK * D);
    });
    return 0;
  });
}

// Clusters n tokens of each unit, [units, n, D]: order [units, n], bounds [units, parts, 2] and the moments of
// `summarise`, float32. work: [units, work_size] floats, room for 2 D + 1 numbers for each of the parts, rounded up to a
// multiple of 64, and for one for each token.
EXPORT int64_t clusters(int64_t width, int64_t threads, int64_t units, int64_t n, int64_t parts, int64_t sampled, int64_t rounds, const float* keys,
                        const float* values, int32_t* order, int32_t* bounds, float* mean_values, float* covariance, float* variance, float* work, int64_t work_size) {
  return with_width(width, [&]<int D>() -> int64_t {
    parallel(threads, units, [&](int u, int) {
      const size_t from = (size_t)u * n * D;
      const Tokens tokens{keys + from, values + from, order + (size_t)u * n, (int)n};
      int32_t* own = bounds + (size_t)u * parts * 2;
      cluster<D>(keys + from, n, parts, sampled, rounds, order + (size_t)u * n, own, work + u * work_size);
      summarise<D>(tokens, own, parts, work + u * work_size, mean_values + (size_t)u * parts * D, covariance + (size_t)u * D * D, variance + (size_t)u * D);
    });
    return 0;
  });
}
