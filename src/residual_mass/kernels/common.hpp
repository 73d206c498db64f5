// What the kernels share: sizes, running softmax sums, the exactly read tokens in float32, threads.
//
// Scores are in units of log 2: queries come in multiplied by scale * log2(e). Shape letters: B = batch rows, H = KV heads,
// G = query heads of a KV head, T = queries of a query head, D = head dimension, N = blocks of 64 tokens, F = room for
// tokens in float32.
#pragma once
#include <algorithm>

#include "simd.hpp"

namespace {

constexpr int BLOCK = 64;         // tokens that share scales of keys
constexpr int GROUP = 4;          // query heads whose sums are kept in registers; larger groups take turns
constexpr int ROWS = 32;          // tokens read exactly between two rescalings
constexpr float LOWEST = -1e30f;  // the score of no token; its weight is 0

// A layer's cache, as `library.py` has it.
struct Buffers {
  int32_t batch, heads, width, bits, blocks, room;  // B, H, D, .., N, F
  int32_t segments;                 // P
  const int32_t *slots, *gap;       // [B] places of tokens in blocks; [B, 2] first and end of places without a token
  const int32_t* k;                 // [B] tokens to read
  int32_t* recents;                 // [B] tokens in float32
  const uint8_t* keys;              // planes: [B, H, N, D / 8, 64, 4]; 8 bits: [.., N, D / 4, 64, 4]; bfloat16: [.., N, D / 2, 64, 2]
  const bf16* scales;               // [B, H, N, 2, D] middle and step of keys
  const uint8_t* rows;              // [B, H, 64 N, 3 D / 2 + 2]: low plane, value, scale of the value
  const uint8_t* values;            // 8 bits: [B, H, N, 32, D, 2]; bfloat16: the same
  const float* value_scales;        // [B, H, 64 N], of 8 bits
  const int32_t* bounds;            // [B, H, P, 2] first and end of each cluster
  const bf16 *mean_values, *slope;  // [B, H, P, D]; [B, H, D, D] covariance of keys (rows) and values
  const float* deviations;          // [B, H, D] of values within clusters
  float* recent;                    // [B, H, F, 2, D] keys and values
};

// The same with what one call asks.
struct Layer : Buffers {
  int32_t group, queries, residual, threads;  // G T, T of the last T tokens in float32, whether to estimate what is not read
  const float* query = nullptr;               // [B, H, G, T, D]
  float *output = nullptr, *log_mass = nullptr;  // [B, H, G, T, D] and [B, H, G, T]
  uint8_t* scratch = nullptr;
};

// Numbers of a tensor of four dimensions, float32 or bfloat16 (`narrow`).
struct View {
  int64_t address, strides[4];
  size_t at(int a, int b, int c) const { return a * strides[0] + b * strides[1] + c * strides[2]; }
};

// A row along the last dimension, times a factor.
template <int D>
void read_row(const View& from, bool narrow, int a, int b, int c, float factor, float* to) {
  const size_t start = from.at(a, b, c), step = from.strides[3];
  if (narrow)
    for (int d = 0; d < D; d++) to[d] = widen_one((const bf16*)from.address + start + d * step) * factor;
  else
    for (int d = 0; d < D; d++) to[d] = ((const float*)from.address)[start + d * step] * factor;
}

// The bfloat16 nearest to x, even ones of equally near.
inline uint32_t bits_of(float x) { return load<uint32_t>(&x); }
inline bf16 nearest(float x) { return (bits_of(x) + 0x7fff + (bits_of(x) >> 16 & 1)) >> 16; }

// Sums of softmax terms in units of 2^top.
template <int D>
struct Sums {
  float top = LOWEST, mass = 0;
  Floats value[D / W] = {};

  void rescale(float to) {
    const float by = exp2(top - to);
    mass *= by, top = to;
    for (Floats& x : value) x *= by;
  }
  // Turns scores, n of them, into weights; scores beyond n are set up to a multiple of W.
  void weigh(float* scores, int n) {
    for (int i = n; i % W; i++) scores[i] = LOWEST;
    Floats most = all(top);
    for (int i = 0; i < n; i += W) most = largest(load<Floats>(scores + i), most);
    const float highest_score = highest(most);
    if (highest_score > top) rescale(highest_score);
    Floats total = {};
    for (int i = 0; i < n; i += W) {
      const Floats weights = exp2(load<Floats>(scores + i) - all(top));
      total += weights, store(scores + i, weights);
    }
    mass += sum(total);
  }
  template <class T>
  void add(float weight, const T* row) {
    for (int j = 0; j < D / W; j++) value[j] += weight * widen(row + j * W);
  }
  void merge(float other_top, float other_mass, const float* other) {
    if (other_mass == 0) return;
    if (other_top > top) rescale(other_top);
    const float by = exp2(other_top - top);
    mass += by * other_mass;
    for (int j = 0; j < D / W; j++) value[j] += by * load<Floats>(other + j * W);
  }
  void write(float* output, float* log_mass) const {
    for (int j = 0; j < D / W; j++) store(output + j * W, mass == 0 ? Floats{} : value[j] / mass);
    *log_mass = mass == 0 ? -__builtin_inff() : 0.69314718f * (top + __builtin_log2f(mass));
  }
};

// Adds n tokens kept in float32: key and value of each, 2 D numbers.
template <int D>
void add_recent(Sums<D>& sums, const float* query, const float* recent, int n) {
  float scores[ROWS];
  for (int i = 0; i < n; i += ROWS, recent += 2 * D * ROWS) {
    const int count = std::min(ROWS, n - i);
    for (int a = 0; a < count; a++) {
      Floats product = {};
      for (int j = 0; j < D; j += W) product += load<Floats>(query + j) * load<Floats>(recent + 2 * D * a + j);
      scores[a] = sum(product);
    }
    sums.weigh(scores, count);
    for (int a = 0; a < count; a++) sums.add(scores[a], recent + 2 * D * a + D);
  }
}

// The runtime that torch has loaded: these names are found in it, and nothing is linked. Without one, one thread serves.
extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
}

// Calls body(task, thread) for every task. Which thread takes which task changes no result.
template <class Body>
void parallel(int threads, int tasks, Body body) {
  struct Team {
    Body* body;
    int tasks, next;
  } team{&body, tasks, 0};
  auto work = [](void* data) {
    Team* team = (Team*)data;
    const int me = omp_get_thread_num();
    for (int task; (task = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED)) < team->tasks;) (*team->body)(task, me);
  };
  threads = std::min(threads, tasks);
  if (threads > 1 && GOMP_parallel && omp_get_thread_num) return GOMP_parallel(work, &team, threads, 0);
  for (int task = 0; task < tasks; task++) body(task, 0);
}

}  // namespace
