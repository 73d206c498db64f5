// Vectors of W numbers, by the vector extensions of GCC and Clang, and the few operations that differ by target.
//
// A library is built for each target from the same sources, so that no inline function of the standard library compiled
// for one CPU is ever called on another.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VNNI 1
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int TILE = W == 4 ? 2 : W == 8 ? 2 : 4;  // vectors of tokens, or of channels, whose sums are kept in registers

typedef uint16_t bf16;  // the upper half of a float
typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint8_t Bytes __attribute__((vector_size(4 * W)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef int32_t Ints4 __attribute__((vector_size(16)));
typedef float Floats4 __attribute__((vector_size(16)));

template <class V>
inline V load(const void* from) {
  V x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class V>
inline V load_half(const void* from) {  // of a vector, and zeros
  V x{};
  memcpy(&x, from, sizeof x / 2);
  return x;
}
template <class V>
inline void store(void* to, V x) {
  memcpy(to, &x, sizeof x);
}
inline Floats all(float x) { return x - Floats{}; }
inline Ints all(int32_t x) { return x - Ints{}; }
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Floats largest(Floats a, Floats b) {
#if VNNI
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
inline Floats absolute(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

// W numbers of a narrower type as floats, and integers as such numbers. GCC converts bytes one by one.
inline Floats widen(const bf16* from) {
#if VNNI
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16);
#else
  typedef uint16_t Narrow __attribute__((vector_size(2 * W)));
  return (Floats)(__builtin_convertvector(load<Narrow>(from), Ints) << 16);
#endif
}
inline Floats widen(const float* from) { return load<Floats>(from); }
inline Floats widen(const int8_t* from) {
#if VNNI
  return to_floats((Ints)_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
  return to_floats((Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  typedef int8_t Narrow __attribute__((vector_size(W)));
  return to_floats(__builtin_convertvector(load<Narrow>(from), Ints));
#endif
}
inline void store_bytes(int8_t* to, Ints x) {
#if VNNI
  store(to, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(shorts, shorts));
#else
  typedef int8_t Narrow __attribute__((vector_size(W)));
  store(to, __builtin_convertvector(x, Narrow));
#endif
}
inline void store_shorts(int16_t* to, Ints x) {
#if VNNI
  store(to, _mm512_cvtepi32_epi16((__m512i)x));
#else
  typedef int16_t Narrow __attribute__((vector_size(2 * W)));
  store(to, __builtin_convertvector(x, Narrow));
#endif
}
inline float widen_one(const void* from) {
  const uint32_t bits = load<bf16>(from) << 16;
  return load<float>(&bits);
}
// Pairs of bfloat16 in 4 bytes: the first of each, and the second.
inline Floats first(Ints pairs) { return (Floats)(pairs << 16); }
inline Floats second(Ints pairs) { return (Floats)(pairs & (int32_t)0xffff0000); }

inline Ints lanes() {
  Ints x;
  for (int i = 0; i < W; i++) x[i] = i;
  return x;
}
inline Ints first_lanes(int count) { return lanes() < count; }

#if defined(__AVX2__) && !defined(VNNI)
// All lanes by an operation of two vectors of 4, halves by halves.
template <class F>
inline float folded(Floats x, F f) {
  const __m128 four = f(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 two = f(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(f(two, _mm_movehdup_ps(two)));
}
#endif
// All lanes of each of four vectors by an operation of two: vectors of one become vectors of two, then of all four.
template <class F>
inline Floats4 folded(const Floats (&x)[4], F f) {
#if VNNI
  const auto pairs = [&](Floats a, Floats b) {
    return (__m512d)f((Floats)_mm512_unpacklo_ps((__m512)a, (__m512)b), (Floats)_mm512_unpackhi_ps((__m512)a, (__m512)b));
  };
  const __m512d one = pairs(x[0], x[1]), two = pairs(x[2], x[3]);
  Floats four = f((Floats)_mm512_unpacklo_pd(one, two), (Floats)_mm512_unpackhi_pd(one, two));
  four = f(four, (Floats)_mm512_shuffle_f32x4((__m512)four, (__m512)four, 0b01'00'11'10));
  four = f(four, (Floats)_mm512_shuffle_f32x4((__m512)four, (__m512)four, 0b10'11'00'01));
  return (Floats4)_mm512_castps512_ps128((__m512)four);
#elif defined(__AVX2__)
  const auto pairs = [&](Floats a, Floats b) {
    return (__m256d)f((Floats)_mm256_unpacklo_ps((__m256)a, (__m256)b), (Floats)_mm256_unpackhi_ps((__m256)a, (__m256)b));
  };
  const __m256d one = pairs(x[0], x[1]), two = pairs(x[2], x[3]);
  const Floats four = f((Floats)_mm256_unpacklo_pd(one, two), (Floats)_mm256_unpackhi_pd(one, two));
  return (Floats4)_mm256_castps256_ps128((__m256)f(four, (Floats)_mm256_permute2f128_ps((__m256)four, (__m256)four, 1)));
#else
  const auto lane = [&](int i) { return Floats{x[0][i], x[1][i], x[2][i], x[3][i]}; };
  return f(f(lane(0), lane(1)), f(lane(2), lane(3)));
#endif
}
inline float sum(Floats x) {
#if VNNI
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(__AVX2__)
  return folded(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
#else
  float total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
#endif
}
inline float highest(Floats x) {
#if VNNI
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  return folded(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
#else
  float most = x[0];
  for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}
inline int32_t sum(Ints x) {
  int32_t total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
}
inline int32_t lowest(Ints x) {
#if VNNI
  return _mm512_reduce_min_epi32((__m512i)x);
#else
  int32_t least = x[0];
  for (int i = 1; i < W; i++) least = x[i] < least ? x[i] : least;
  return least;
#endif
}
inline int32_t highest(Ints x) {
#if VNNI
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t most = x[0];
  for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}
#if defined(__AVX2__)  // else it is the same type, and so are those of the products below
inline int32_t sum(Ints4 x) { return (x[0] + x[1]) + (x[2] + x[3]); }
#endif

// The nearest integers, even ones of equally near; of numbers below 2^22.
inline Ints rounded(Floats x) {
#if VNNI
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#endif
  const Floats magic = all(12582912.f);
  return (Ints)(x + magic) - (Ints)magic;
}

// 2^x by a polynomial that has these coefficients before 1; nothing is less than 2^LEAST, and x is at most 127.
template <int LEAST, int N>
inline Floats exp2_by(Floats x, const float (&coefficients)[N]) {
  x = largest(all((float)LEAST), x);  // in this order NaN stays
#if VNNI
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, 0), part = x - whole;
#else
  const Ints whole = rounded(x);
  const Floats part = x - to_floats(whole);
#endif
  Floats power = all(coefficients[0]);
  for (int i = 1; i < N; i++) power = power * part + all(coefficients[i]);
  power = power * part + all(1.f);
#if VNNI
  return (Floats)_mm512_scalef_ps((__m512)power, (__m512)whole);
#else
  return power * (Floats)((whole + 127) << 23);
#endif
}
// 2^x with a relative error of 2e-7, and next to nothing below x = -126.5.
inline Floats exp2(Floats x) {
  return exp2_by<-127>(x, {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f});
}
// 2^x with a relative error of 3e-6, for what is rounded to 8 bits or estimated, and never a number below the normal ones,
// which are slow.
inline Floats exp2_rough(Floats x) { return exp2_by<-125>(x, {9.5825763e-3f, 5.5906828e-2f, 2.4024107e-1f, 6.9312412e-1f}); }
inline float exp2(float x) { return exp2(all(x))[0]; }

// Adds to each sum the products of its four bytes: codes without sign, below 16 but in `dot4_wide`, and signed ones.
inline Ints dot4(Ints sums, Bytes codes, Ints with) {
#if VNNI
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)with);
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)codes, (__m256i)with), _mm256_set1_epi16(1));
#else
  for (int i = 0; i < 4 * W; i++) sums[i / 4] += codes[i] * ((int8_t*)&with)[i];
  return sums;
#endif
}
// `dot4_wide`: the same for codes of 8 bits less CENTRE, which is 0 where codes are multiplied without sign.
// `Shorts`: sums that as many as FEW calls of `dot4` add to, and which `widened` makes into those of four bytes each.
#if defined(__AVX2__) && !defined(VNNI)
constexpr float CENTRE = 128;
inline Ints dot4_wide(Ints sums, Bytes codes, Ints with) {  // |code - 128| * |with| twice fits 16 bits, 255 * 127 would not
  const __m256i signed_codes = (__m256i)(codes ^ 128), size = _mm256_abs_epi8(signed_codes);
  return sums + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8((__m256i)with, signed_codes)), _mm256_set1_epi16(1));
}
typedef int16_t Shorts __attribute__((vector_size(4 * W)));  // of two bytes each
constexpr int FEW = 8;  // 8 * 2 * 15 * 127 fits 16 bits
inline Shorts dot4(Shorts sums, Bytes codes, Ints with) { return sums + (Shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)with); }
inline Ints widened(Shorts sums) { return (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#else
constexpr float CENTRE = 0;
inline Ints dot4_wide(Ints sums, Bytes codes, Ints with) { return dot4(sums, codes, with); }
typedef Ints Shorts;
constexpr int FEW = 1 << 16;
inline Ints widened(Ints sums) { return sums; }
#endif
#if defined(__AVX2__)
inline Ints4 dot4(Ints4 sums, Bytes16 codes, Ints4 with) {
#if VNNI
  return (Ints4)_mm_dpbusd_epi32((__m128i)sums, (__m128i)codes, (__m128i)with);
#else
  return sums + (Ints4)_mm_madd_epi16(_mm_maddubs_epi16((__m128i)codes, (__m128i)with), _mm_set1_epi16(1));
#endif
}
#endif
// Adds to each sum the products of two bytes, signed, with a pair of 16-bit numbers.
inline Ints dot2(Ints sums, const int8_t* codes, int32_t pair) {
#if VNNI
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)codes)), _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
  return sums + (Ints)_mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes)), _mm256_set1_epi32(pair));
#else
  const int32_t one = (int16_t)pair, two = pair >> 16;
  for (int i = 0; i < W; i++) sums[i] += codes[2 * i] * one + codes[2 * i + 1] * two;
  return sums;
#endif
}

// The places of the bits that are set in each number of 8 bits, the lowest first.
struct SetBits {
  uint8_t places[256][8] = {};
  constexpr SetBits() {
    for (int number = 0; number < 256; number++)
      for (int bit = 0, count = 0; bit < 8; bit++)
        if (number >> bit & 1) places[number][count++] = bit;
  }
};
inline constexpr SetBits SET_BITS;

// Writes the lanes of x where `chosen`, and returns how many there are. Up to W places are written to.
inline int append(int32_t* to, Ints x, Ints chosen) {
#if VNNI
  const __mmask16 mask = _mm512_movepi32_mask((__m512i)chosen);
  store(to, _mm512_maskz_compress_epi32(mask, (__m512i)x));
  return __builtin_popcount(mask);
#elif defined(__AVX2__)
  const int mask = _mm256_movemask_ps((__m256)chosen);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)SET_BITS.places[mask]));
  store(to, _mm256_permutevar8x32_epi32((__m256i)x, order));
  return __builtin_popcount(mask);
#else
  int count = 0;
  for (int i = 0; i < W; i++) to[count] = x[i], count -= chosen[i];
  return count;
#endif
}
// How many of n numbers, a multiple of W, are not below a threshold.
inline int count_from(const int32_t* x, int n, int32_t threshold) {
#if VNNI
  int found = 0;
#pragma GCC unroll 4
  for (int i = 0; i < n; i += W) found += __builtin_popcount(_mm512_cmpge_epi32_mask((__m512i)load<Ints>(x + i), _mm512_set1_epi32(threshold)));
  return found;
#else
  Ints found = {};
  for (int i = 0; i < n; i += W) found -= load<Ints>(x + i) >= threshold;
  return sum(found);
#endif
}
// A bit for each lane, the lowest for the first: whether x is not below y.
inline uint32_t not_below(Floats x, Floats y) {
#if VNNI
  return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_NLT_UQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)y, _CMP_NLT_UQ));
#else
  uint32_t mask = 0;
  for (int i = 0; i < W; i++) mask |= (uint32_t)!(x[i] < y[i]) << i;
  return mask;
#endif
}

// Inlined always: GCC takes what only prefetches for a function without effect, and removes calls of it.
__attribute__((always_inline)) inline void prefetch(const void* from, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i);
}

}  // namespace
