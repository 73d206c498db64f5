// What `library.py` calls, for the head dimensions of `with_width`.
#include <cstdlib>

#include "full.hpp"
#include "pack.hpp"
#include "products.hpp"
#include "prompt.hpp"
#include "torch.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

// What `library.py` asks for: another number whenever the meaning of an argument or of `Buffers` changes.
EXPORT int interface() { return 7; }

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
  unsigned a, b, c = 0, d;
  __get_cpuid(1, &a, &b, &c, &d);  // clang 14 does not know the name of F16C
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (c & bit_F16C);
  const bool wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx2 ? 1 + (wide && __builtin_cpu_supports("avx512vnni")) : 0;
#else
  return 0;
#endif
}

// Scratch memory of this thread, which grows; null if there is no more memory.
static uint8_t* scratch_memory(size_t bytes) {
  constexpr size_t LINE = 64;
  static thread_local struct Memory {
    size_t bytes = 0;
    void* at = nullptr;
    ~Memory() { free(at); }
  } memory;
  if (bytes > memory.bytes) {
    free(memory.at);
    memory.bytes = (bytes + bytes / 4 + LINE - 1) / LINE * LINE, memory.at = aligned_alloc(LINE, memory.bytes);
    if (!memory.at) memory.bytes = 0;
  }
  return (uint8_t*)memory.at;
}

// Views of a call, in this order.
struct Views {
  View query, key, value;  // [B, H G, T, D], and [B, H, T, D] of the new tokens
  View output, log_mass;   // [B, T, H G, D], and [B, T, H G, 1] or null
};

// Adds the new tokens in float32, and makes the queries ready.
template <int D>
static void take(const Layer& layer, const Views& views, bool narrow, float factor, float* query) {
  const int group = layer.group / layer.queries;
  for (int unit = 0; unit < layer.batch * layer.heads; unit++) {
    const int row = unit / layer.heads, head = unit % layer.heads;
    float* recent = layer.recent + ((size_t)unit * layer.room + layer.recents[row]) * 2 * D;
    for (int t = 0; t < layer.queries; t++, recent += 2 * D) {
      read_row<D>(views.key, narrow, row, head, t, 1, recent);
      read_row<D>(views.value, narrow, row, head, t, 1, recent + D);
    }
    for (int g = 0; g < group; g++)
      for (int t = 0; t < layer.queries; t++, query += D) read_row<D>(views.query, narrow, row, head * group + g, t, factor, query);
  }
  for (int row = 0; row < layer.batch; row++) layer.recents[row] += layer.queries;
}

// Writes outputs in the type of the queries, and the logarithms that are wanted.
template <int D>
static void give(const Layer& layer, const Views& views, bool narrow) {
  const int query_heads = layer.heads * layer.group / layer.queries;
  const float *output = layer.output, *log_mass = layer.log_mass;
  for (int row = 0; row < layer.batch; row++)
    for (int h = 0; h < query_heads; h++)
      for (int t = 0; t < layer.queries; t++, output += D, log_mass++) {
        const size_t at = views.output.at(row, t, h);
        if (narrow)
          for (int d = 0; d < D; d++) ((bf16*)views.output.address)[at + d] = output[d] == output[d] ? nearest(output[d]) : 0x7fc0;
        else memcpy((float*)views.output.address + at, output, D * sizeof(float));
        if (views.log_mass.address) ((float*)views.log_mass.address)[views.log_mass.at(row, t, h)] = *log_mass;
      }
}

// Calls f with the type of the kernel: full attention, or a step of planes.
template <int D, class F>
static auto with_kernel(int bits, bool full, F f) {
  if (bits == 4) return full ? f.template operator()<FullStep<Planes, D>>() : f.template operator()<Step<D>>();
  return bits == 8 ? f.template operator()<FullStep<Eight, D>>() : f.template operator()<FullStep<Bfloat16, D>>();
}

// Adds T tokens to each row, and computes the attention of their queries: of one token as the format has it, or (`full`)
// to all tokens up to its own, with both planes. `narrow`: queries, keys, values and outputs are bfloat16, not float32;
// factor: of queries. Returns 1; 0 if a row has no room for the tokens, and -1 without memory, and then does nothing.
EXPORT int64_t attend(const Buffers* buffers, const Views* views, int full, int residual, int threads, int query_heads, int tokens, int narrow, float factor) {
  for (int row = 0; row < buffers->batch; row++)
    if (buffers->recents[row] + tokens > buffers->room) return 0;
  return with_width(buffers->width, [&]<int D>() -> int64_t {
    Layer layer{*buffers, query_heads / buffers->heads * tokens, tokens, residual, threads};
    return with_kernel<D>(layer.bits, full, [&]<class Kernel>() -> int64_t {
      const size_t queries = (size_t)layer.batch * query_heads * tokens, most = Kernel{layer}.bytes() / sizeof(float) + W;
      float* memory = (float*)scratch_memory(sizeof(float) * (queries * (2 * D + 1) + most));
      if (!memory) return -1;
      layer.query = memory, layer.output = memory + queries * D;
      layer.scratch = (uint8_t*)(memory + queries * 2 * D);
      layer.log_mass = memory + queries * 2 * D + most;
      take<D>(layer, *views, narrow, factor, memory);
      Kernel{layer}.run();
      give<D>(layer, *views, narrow);
      return 1;
    });
  });
}

// Causal attention of T tokens, the last ones of C keys of which each sees the last `window`; with the buffers of a cache,
// also to all tokens that it holds. The new ones are not added to it. The views are those of `attend`, with keys and
// values [B, H, C, D]. `narrow`: all of them are bfloat16, not float32, but log_mass. Returns 1, or -1 without memory.
EXPORT int64_t prompt(const Buffers* held, const Views* views, int width, int batch, int heads, int query_heads, int tokens, int keys, int window, int threads, int narrow, float factor) {
  return with_width(width, [&]<int D>() -> int64_t {
    const Prompt of{views->query, views->output, views->log_mass, batch, heads, query_heads / heads, tokens, keys, window, narrow != 0, factor};
    const Dense from{views->key, views->value, narrow != 0};
    const auto run = [&]<class Word>() -> int64_t {
      void* memory = scratch_memory(sizeof(PromptScratch<Word, D>) * threads);
      if (memory) read_prompt<Word, D>(of, held, from, threads, memory);
      return memory ? 1 : -1;
    };
#if VNNI
    if (narrow && multiplies_pairs() && !(held && held->bits < 16)) return run.template operator()<int32_t>();
#endif
    return run.template operator()<float>();
  });
}

// Keys and values of units, [1, units, n, D].
struct Source {
  View keys, values;
  Tokens of(int unit, bool narrow, const int32_t* order, int n) const {
    const auto rows = [&](const View& of) { return Rows{(const uint8_t*)of.address + unit * of.strides[1] * (narrow ? 2 : 4), of.strides[2], of.strides[3], narrow}; };
    return {rows(keys), rows(values), order, n};
  }
};

// Packs n tokens of `units` KV heads; order [units, n] or null. The targets start at the first block to write, and each unit
// has `blocks`.
EXPORT int64_t pack(int64_t width, int64_t bits, int64_t threads, int64_t units, int64_t n, int64_t blocks, const Source* source, int64_t narrow,
                    const int32_t* order, uint8_t* to_keys, bf16* scales, uint8_t* to_values, float* value_scales) {
  return with_width(width, [&]<int D>() -> int64_t {
    parallel(threads, units, [&](int u, int) {
      const size_t block = (size_t)u * blocks;
      const Tokens tokens = source->of(u, narrow, order ? order + (size_t)u * n : nullptr, n);
      if (bits == 4) pack_planes<D>(tokens, to_keys + block * (BLOCK * D / 2), scales + block * 2 * D, to_values + block * BLOCK * (D / 2 + D + 2));
      else if (bits == 8) pack_eight<D>(tokens, to_keys + block * BLOCK * D, scales + block * 2 * D, to_values + block * BLOCK * D, value_scales + block * BLOCK);
      else pack_bfloat16<D>(tokens, to_keys + block * 2 * BLOCK * D, to_values + block * 2 * BLOCK * D);
    });
    return 0;
  });
}

// Clusters n tokens of each unit: order [units, n], bounds [units, parts, 2] and the moments of `summarise`, float32.
// work: [units, work_size] floats, room for 2 D + 1 numbers for each of the parts, rounded up to a multiple of 64, and for
// one for each token.
EXPORT int64_t clusters(int64_t width, int64_t threads, int64_t units, int64_t n, int64_t parts, int64_t sampled, int64_t rounds, const Source* source,
                        int64_t narrow, int32_t* order, int32_t* bounds, float* mean_values, float* covariance, float* variance, float* work, int64_t work_size) {
  return with_width(width, [&]<int D>() -> int64_t {
    parallel(threads, units, [&](int u, int) {
      const Tokens tokens = source->of(u, narrow, order + (size_t)u * n, n);
      int32_t* own = bounds + (size_t)u * parts * 2;
      cluster<D>(tokens.keys, n, parts, sampled, rounds, order + (size_t)u * n, own, work + u * work_size);
      summarise<D>(tokens, own, parts, work + u * work_size, mean_values + (size_t)u * parts * D, covariance + (size_t)u * D * D, variance + (size_t)u * D);
    });
    return 0;
  });
}

// Returns 0, or -1 without memory.
static int64_t run_products(const Products& products, const void* x, bool narrow) {
  float* memory = (float*)scratch_memory(sizeof(float) * products.size());
  if (!memory) return -1;
  products.run(memory, x, narrow);
  return 0;
}

// Writes the products [M, rows] of activations x [M, columns] with a weight, float32 or bfloat16 (`narrow`), to the first
// columns of a tensor [M, width]. Returns 0, or -1 without memory.
EXPORT int64_t multiply(const int32_t* words, const uint16_t* scales, const int32_t* exponents, int rows, int columns, int bits, int group, int middle, int minimums,
                        const void* x, int count, int narrow, void* to, int width, int threads) {
  const Weights weights{words, scales, exponents, rows, columns, bits, group, middle, minimums};
  const Result result{to, (size_t)width, (bool)narrow};
  return run_products({&weights, &result, 1, count, threads}, x, narrow);
}

// Writes a weight, a column of all blocks' rows after the other.
EXPORT void dequantise(const int32_t* words, const uint16_t* scales, const int32_t* exponents, int rows, int columns, int bits, int group, int middle, int minimums,
                       int narrow, void* to, int threads) {
  const Weights weights{words, scales, exponents, rows, columns, bits, group, middle, minimums};
  with_bits(bits, [&]<int BITS>() { dequantise_all<BITS>(weights, threads, Result{to, (size_t)weights.blocks() * ROWS_OF_BLOCK, (bool)narrow}); });
}

// Takes what operations need of torch.
EXPORT void connect(const Torch* functions) { torch_functions = *functions; }

constexpr int MOST = 4;  // weights of an operation

// Arguments of weights, whose tensors are released with this.
struct WeightArguments {
  static constexpr int COUNT = 6;  // words, scales, exponents, N, group, middle
  const uint64_t *first, *end;

  int number() const { return (end - first) / COUNT; }
  Weights of(int i, int columns) const {
    const uint64_t* own = first + i * COUNT;
    const Handle words(own[0]), scales(own[1]), exponents(own[2]);
    const int bits = words.sizes()[2], minimums = scales.sizes()[2] - 1;
    return {(const int32_t*)words.data(), (const uint16_t*)scales.data(), (const int32_t*)exponents.data(), (int)own[3], columns, bits, (int)own[4], (int)own[5], minimums};
  }
  ~WeightArguments() {
    for (const uint64_t* own = first; own < end; own += COUNT)
      for (int i = 0; i < 3; i++) Tensor{own[i]};
  }
};

// An operation of torch: the products of activations [.., K] with several weights, side by side [.., the sum of N]. Its
// arguments are the activations, the number of threads, and those of each weight.
EXPORT void multiply_operation(uint64_t* stack, uint64_t arguments, uint64_t) {
  const Tensor x(stack[0]);
  const WeightArguments given{stack + 2, stack + arguments};
  const int threads = stack[1], number = given.number(), dimensions = x.dimensions(), type = x.type();
  const bool narrow = type == torch_functions.bfloat16, single = type == torch_functions.float32;
  if (!(narrow || single) || !x.contiguous() || dimensions < 1 || dimensions > MOST_DIMENSIONS || number > MOST)
    throw std::invalid_argument("activations are contiguous, in float32 or bfloat16, and weights four at most");
  int64_t sizes[MOST_DIMENSIONS], count = 1, rows = 0;
  std::copy_n(x.sizes(), dimensions, sizes);
  for (int i = 0; i < dimensions - 1; i++) count *= sizes[i];
  const int columns = sizes[dimensions - 1];
  Weights weights[MOST];
  for (int i = 0; i < number; i++) weights[i] = given.of(i, columns), rows += weights[i].rows;
  sizes[dimensions - 1] = rows;
  Tensor output(made(dimensions, sizes, type));
  Result results[MOST];
  char* to = (char*)output.data();
  for (int i = 0; i < number; to += weights[i++].rows * (narrow ? 2 : 4)) results[i] = {to, (size_t)rows, narrow};
  if (run_products({weights, results, number, (int)count, threads}, x.data(), narrow)) throw std::bad_alloc();
  stack[0] = (uint64_t)std::exchange(output.handle, nullptr);
}
