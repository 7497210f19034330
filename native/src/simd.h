// Vectors of W floats on the compiler's vector extensions: one source for AVX-512 (16), AVX2 (8)
// and SSE or NEON (4). All functions are forced inline: each takes its caller's instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#define PDCTL_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define PDCTL_SHUFFLE(I, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PDCTL_SHUFFLE(I, a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

namespace pdctl {

template <int W>
struct Lanes;

// For each width: the shuffles of which a W x W transposition consists, lo and hi of each step.
// Within 128 bits: single floats (one), pairs of floats (two). Between 128-bit parts: `part`.
template <>
struct Lanes<4> {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  typedef uint16_t H __attribute__((vector_size(8)));
  static constexpr I kIndex = {0, 1, 2, 3};

  static PDCTL_INLINE F one_lo(F a, F b) { return PDCTL_SHUFFLE(I, a, b, 0, 4, 1, 5); }
  static PDCTL_INLINE F one_hi(F a, F b) { return PDCTL_SHUFFLE(I, a, b, 2, 6, 3, 7); }
  static PDCTL_INLINE F two_lo(F a, F b) { return PDCTL_SHUFFLE(I, a, b, 0, 1, 4, 5); }
  static PDCTL_INLINE F two_hi(F a, F b) { return PDCTL_SHUFFLE(I, a, b, 2, 3, 6, 7); }
};

template <>
struct Lanes<8> {
  typedef float F __attribute__((vector_size(32)));
  typedef int32_t I __attribute__((vector_size(32)));
  typedef uint16_t H __attribute__((vector_size(16)));
  static constexpr I kIndex = {0, 1, 2, 3, 4, 5, 6, 7};

  static PDCTL_INLINE F one_lo(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 0, 8, 1, 9, 4, 12, 5, 13);
  }
  static PDCTL_INLINE F one_hi(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  static PDCTL_INLINE F two_lo(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 0, 1, 8, 9, 4, 5, 12, 13);
  }
  static PDCTL_INLINE F two_hi(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  static PDCTL_INLINE F part_lo(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 0, 1, 2, 3, 8, 9, 10, 11);
  }
  static PDCTL_INLINE F part_hi(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
};

template <>
struct Lanes<16> {
  typedef float F __attribute__((vector_size(64)));
  typedef int32_t I __attribute__((vector_size(64)));
  typedef uint16_t H __attribute__((vector_size(32)));
  static constexpr I kIndex = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  static PDCTL_INLINE F one_lo(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  }
  static PDCTL_INLINE F one_hi(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  static PDCTL_INLINE F two_lo(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  }
  static PDCTL_INLINE F two_hi(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  // Parts 0 and 2 of both (lo), 1 and 3 of both (hi): what the instruction set can do in one step.
  static PDCTL_INLINE F part_lo(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  }
  static PDCTL_INLINE F part_hi(F a, F b) {
    return PDCTL_SHUFFLE(I, a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
};

template <int W>
using Floats = typename Lanes<W>::F;
template <int W>
using Ints = typename Lanes<W>::I;

template <int W>
PDCTL_INLINE Floats<W> load(const float* p) {
  Floats<W> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <int W>
PDCTL_INLINE void store(float* p, Floats<W> v) {
  std::memcpy(p, &v, sizeof v);
}

template <int W>
PDCTL_INLINE Floats<W> fill(float x) {
  return x - Floats<W>{};  // not 0 + x, which a -0 keeps from being a plain broadcast
}

// bfloat16 is the upper half of a float.
template <int W>
PDCTL_INLINE Floats<W> load_bf16(const uint16_t* p) {
  typename Lanes<W>::H half;
  std::memcpy(&half, p, sizeof half);
  const Ints<W> bits = __builtin_convertvector(half, Ints<W>) << 16;
  return reinterpret_cast<Floats<W>>(bits);
}

PDCTL_INLINE float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// To nearest, ties to even, as torch does; a NaN stays one.
PDCTL_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <int W>
PDCTL_INLINE float max_lane(Floats<W> v) {
  float best = v[0];
  for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

template <int W>
PDCTL_INLINE float sum_lanes(Floats<W> v) {
  float total = v[0];
  for (int i = 1; i < W; ++i) total += v[i];
  return total;
}

// e^x for x <= 0, to about 2 ulp; exactly 1 at 0, exactly 0 below -87; a NaN stays one.
// Our own, so that results depend neither on the C library nor on the number of lanes in use.
template <int W>
PDCTL_INLINE Floats<W> exp_nonpositive(Floats<W> x) {
  constexpr float kLowest = -87.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats<W> lowest = fill<W>(kLowest);
  const Floats<W> y = x < lowest ? lowest : x;
  const Floats<W> shifted = y * 1.44269504f + kRound;
  const Floats<W> n = shifted - kRound;
  const Floats<W> r = (y - n * 0.693145752f) - n * 1.42860677e-6f;
  Floats<W> p = fill<W>(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints<W> exponent = reinterpret_cast<Ints<W>>(shifted) << 23;
  const Floats<W> power = reinterpret_cast<Floats<W>>(reinterpret_cast<Ints<W>>(p) + exponent);
  const Floats<W> result = y != y ? y : power;
  return x < lowest ? Floats<W>{} : result;
}

// The sum of 4 neighbouring lanes, spread over 4 vectors: in this order in sum_each, too.
template <int W>
PDCTL_INLINE Floats<W> sum_quad(Floats<W> a, Floats<W> b, Floats<W> c, Floats<W> d) {
  return (a + c) + (b + d);
}

// Lane j of the result is the sum of all lanes of v[j]: quads as in sum_quad, then quads in pairs,
// then these in pairs.
template <int W>
PDCTL_INLINE Floats<W> sum_each(const Floats<W>* v) {
  using L = Lanes<W>;
  Floats<W> quads[W / 4];
  for (int g = 0; g < W / 4; ++g) {
    const Floats<W>* x = v + 4 * g;
    const Floats<W> ab = L::one_lo(x[0], x[1]) + L::one_hi(x[0], x[1]);
    const Floats<W> cd = L::one_lo(x[2], x[3]) + L::one_hi(x[2], x[3]);
    quads[g] = L::two_lo(ab, cd) + L::two_hi(ab, cd);
  }
  if constexpr (W == 4) {
    return quads[0];
  } else if constexpr (W == 8) {
    return L::part_lo(quads[0], quads[1]) + L::part_hi(quads[0], quads[1]);
  } else {
    const Floats<W> a = L::part_lo(quads[0], quads[1]) + L::part_hi(quads[0], quads[1]);
    const Floats<W> b = L::part_lo(quads[2], quads[3]) + L::part_hi(quads[2], quads[3]);
    return L::part_lo(a, b) + L::part_hi(a, b);
  }
}

// Lane j of v[i] becomes lane i of v[j].
template <int W>
PDCTL_INLINE void transpose(Floats<W>* v) {
  using L = Lanes<W>;
  Floats<W> t[4][W / 4];  // [i][g]: columns 4 * part + i of rows 4g .. 4g+3
  for (int g = 0; g < W / 4; ++g) {
    const Floats<W>* x = v + 4 * g;
    const Floats<W> ab_lo = L::one_lo(x[0], x[1]), ab_hi = L::one_hi(x[0], x[1]);
    const Floats<W> cd_lo = L::one_lo(x[2], x[3]), cd_hi = L::one_hi(x[2], x[3]);
    t[0][g] = L::two_lo(ab_lo, cd_lo);
    t[1][g] = L::two_hi(ab_lo, cd_lo);
    t[2][g] = L::two_lo(ab_hi, cd_hi);
    t[3][g] = L::two_hi(ab_hi, cd_hi);
  }
  for (int i = 0; i < 4; ++i) {
    if constexpr (W == 4) {
      v[i] = t[i][0];
    } else if constexpr (W == 8) {
      v[i] = L::part_lo(t[i][0], t[i][1]);
      v[4 + i] = L::part_hi(t[i][0], t[i][1]);
    } else {
      const Floats<W> even_a = L::part_lo(t[i][0], t[i][1]), odd_a = L::part_hi(t[i][0], t[i][1]);
      const Floats<W> even_b = L::part_lo(t[i][2], t[i][3]), odd_b = L::part_hi(t[i][2], t[i][3]);
      v[i] = L::part_lo(even_a, even_b);
      v[4 + i] = L::part_lo(odd_a, odd_b);
      v[8 + i] = L::part_hi(even_a, even_b);
      v[12 + i] = L::part_hi(odd_a, odd_b);
    }
  }
}

}  // namespace pdctl
