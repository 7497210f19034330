// The arithmetic of attention for one KV head and a few tokens of one sequence, for W-lane vectors.
//
// K and V are read once, in tiles of 64 positions, for all rows (a row is one query head of one
// token), with an online softmax in float32. The order of a row's operations depends on its own
// position alone: tiles start at multiples of 64 and every sum goes in the order of positions. That
// is what makes results independent of the batch.
//
// This header is compiled once per instruction set, so that nothing in it may leave a function
// behind that the linker could share between them: no std functions, all own ones are inline by
// force or templates of W.
#pragma once

#include <limits>

#include "attention_kernels.h"
#include "simd.h"

namespace pdctl {

constexpr int64_t kTile = 64;  // positions
// From this many rows on, transposing a tile of K costs less than summing across lanes per row.
constexpr int64_t kTransposeFrom = 12;

PDCTL_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
PDCTL_INLINE int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// One thread's memory for one (group, KV head).
template <int W>
class Scratch {
 public:
  PDCTL_INLINE Scratch(float* memory, int64_t padded) : memory_(memory), padded_(padded) {}
  static PDCTL_INLINE int64_t floats(int64_t padded) {
    return 2 * kMaxRows * padded + kMaxRows * (1 + W) + 4 * kTile + 3 * kTile * padded;
  }
  PDCTL_INLINE float* query(int64_t row) { return memory_ + row * padded_; }
  PDCTL_INLINE float* sum(int64_t row) { return query(kMaxRows) + row * padded_; }
  PDCTL_INLINE float* denominator(int64_t row) { return sum(kMaxRows) + row * W; }
  PDCTL_INLINE float* maximum(int64_t row) { return denominator(kMaxRows) + row; }
  PDCTL_INLINE float* weights(int64_t row) { return maximum(kMaxRows) + row * kTile; }  // 4 rows
  PDCTL_INLINE float* keys() { return weights(4); }
  PDCTL_INLINE float* values() { return keys() + kTile * padded_; }
  PDCTL_INLINE float* transposed() { return values() + kTile * padded_; }

 private:
  float* memory_;
  int64_t padded_;
};

// Pointers to W rows of K and of V each, all of `padded` floats.
template <int W>
struct Tile {
  const float* k[kTile / W];
  const float* v[kTile / W];
  const float* transposed;  // K as [kTile / W][padded][W], or null
};

// Copies `dim` numbers as floats and pads them with zeros.
template <int W, bool kBf16>
PDCTL_INLINE void stage(const void* source, int64_t offset, int64_t dim, int64_t padded,
                        float* out) {
  int64_t d = 0;
  if constexpr (kBf16) {
    const uint16_t* in = static_cast<const uint16_t*>(source) + offset;
    for (; d + W <= dim; d += W) store<W>(out + d, load_bf16<W>(in + d));
    for (; d < dim; ++d) out[d] = from_bf16(in[d]);
  } else {
    const float* in = static_cast<const float*>(source) + offset;
    for (; d + W <= dim; d += W) store<W>(out + d, load<W>(in + d));
    for (; d < dim; ++d) out[d] = in[d];
  }
  for (; d < padded; ++d) out[d] = 0.0f;
}

// Stages rows that are neighbours in the pool; without padding they are one long row.
template <int W, bool kBf16>
PDCTL_INLINE void stage_rows(const Attention& a, int64_t offset, int64_t rows, int64_t padded,
                             float* out) {
  if (padded == a.head_dim) {
    stage<W, kBf16>(a.kv, offset, rows * padded, rows * padded, out);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    stage<W, kBf16>(a.kv, offset + i * a.head_dim, a.head_dim, padded, out + i * padded);
  }
}

// Finds positions start .. start+count-1 of a sequence in the pool. Where every W rows are
// neighbours and need no conversion they are used in place; else all are gathered into scratch.
template <int W, bool kBf16>
PDCTL_INLINE void find_tile(const Attention& a, const int32_t* table, int64_t kv_head,
                            int64_t start, int64_t count, int64_t padded, Scratch<W>& scratch,
                            Tile<W>& tile) {
  const bool in_place = !kBf16 && padded == a.head_dim && a.block_size % W == 0;
  for (int64_t i = 0; i < count;) {
    const int64_t block = (start + i) / a.block_size;
    const int64_t token = (start + i) % a.block_size;
    const int64_t rows = smaller(count - i, in_place ? W : a.block_size - token);
    const int64_t k = table[block] * a.block_stride + kv_head * a.head_stride + token * a.head_dim;
    const int64_t v = k + a.value_stride;
    if (in_place) {
      tile.k[i / W] = static_cast<const float*>(a.kv) + k;
      tile.v[i / W] = static_cast<const float*>(a.kv) + v;
    } else {
      stage_rows<W, kBf16>(a, k, rows, padded, scratch.keys() + i * padded);
      stage_rows<W, kBf16>(a, v, rows, padded, scratch.values() + i * padded);
    }
    i += rows;
  }
  if (in_place) return;
  for (int64_t s = 0; s < kTile / W; ++s) {
    tile.k[s] = scratch.keys() + s * W * padded;
    tile.v[s] = scratch.values() + s * W * padded;
  }
}

template <int W>
PDCTL_INLINE void transpose_keys(Tile<W>& tile, int64_t count, int64_t padded, float* out) {
  tile.transposed = out;
  for (int64_t s = 0; s * W < count; ++s) {
    for (int64_t d = 0; d < padded; d += W) {
      Floats<W> square[W];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) square[j] = load<W>(tile.k[s] + j * padded + d);
      transpose<W>(square);
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) store<W>(out + (s * padded + d + j) * W, square[j]);
    }
  }
}

// Lane j: query . k[j].
template <int W>
PDCTL_INLINE Floats<W> score(const float* query, const float* k, int64_t padded) {
  Floats<W> dots[W];
  for (int j = 0; j < W; ++j) dots[j] = Floats<W>{};
  for (int64_t d = 0; d < padded; d += W) {
    const Floats<W> q = load<W>(query + d);
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) dots[j] += q * load<W>(k + j * padded + d);
  }
  return sum_each<W>(dots);
}

// The quad-th quads' share of score() for R rows, from transposed keys: the same products and sums
// in the same order, only spread over vectors instead of lanes.
template <int W, int R>
PDCTL_INLINE void score_quad(const float* query, const float* k, int64_t padded, int quad,
                             Floats<W>* out) {
  Floats<W> dots[R][4];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 4; ++i) dots[r][i] = Floats<W>{};
  }
  for (int64_t d = 4 * quad; d < padded; d += W) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Floats<W> key = load<W>(k + (d + i) * W);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) dots[r][i] += fill<W>(query[r * padded + d + i]) * key;
    }
  }
  for (int r = 0; r < R; ++r) {
    out[r] = sum_quad<W>(dots[r][0], dots[r][1], dots[r][2], dots[r][3]);
  }
}

template <int W, int R>
PDCTL_INLINE void score_transposed(const float* query, const float* k, int64_t padded, float* out) {
  Floats<W> total[R];
  score_quad<W, R>(query, k, padded, 0, total);
  if constexpr (W >= 8) {
    Floats<W> next[R];
    score_quad<W, R>(query, k, padded, 1, next);
    for (int r = 0; r < R; ++r) total[r] += next[r];
  }
  if constexpr (W == 16) {
    Floats<W> third[R];
    Floats<W> fourth[R];
    score_quad<W, R>(query, k, padded, 2, third);
    score_quad<W, R>(query, k, padded, 3, fourth);
    for (int r = 0; r < R; ++r) total[r] += third[r] + fourth[r];
  }
  for (int r = 0; r < R; ++r) store<W>(out + r * kTile, total[r]);
}

// weights[r][0 .. count-1] = scores of R neighbouring rows. What a position past a row's own or the
// sequence's end gets is garbage, masked later.
template <int W, int R>
PDCTL_INLINE void score_rows(const float* query, const Tile<W>& tile, int64_t count, int64_t padded,
                             float* weights) {
  constexpr int kTogether = W == 16 ? 4 : 2;  // so that all sums stay in registers
  if constexpr (R > kTogether) {
    score_rows<W, kTogether>(query, tile, count, padded, weights);
    score_rows<W, R - kTogether>(query + kTogether * padded, tile, count, padded,
                                 weights + kTogether * kTile);
  } else {
    for (int64_t s = 0; s * W < count; ++s) {
      if (tile.transposed != nullptr) {
        const float* keys = tile.transposed + s * padded * W;
        score_transposed<W, R>(query, keys, padded, weights + s * W);
        continue;
      }
      for (int r = 0; r < R; ++r) {
        const Floats<W> x = score<W>(query + r * padded, tile.k[s], padded);
        store<W>(weights + r * kTile + s * W, x);
      }
    }
  }
}

// Makes the row's scores of a tile, of which it sees the first `valid`, softmax weights; brings the
// row's sums to the new maximum.
template <int W>
PDCTL_INLINE void weigh(Scratch<W>& scratch, int64_t row, int64_t valid, int64_t padded,
                        float* weights) {
  const Floats<W> nothing = fill<W>(-std::numeric_limits<float>::infinity());
  Floats<W> best = nothing;
  const int64_t parts = (valid + W - 1) / W;
  for (int64_t s = 0; s < parts; ++s) {
    const Ints<W> position = Lanes<W>::kIndex + static_cast<int32_t>(s * W);
    const Floats<W> x =
        position < static_cast<int32_t>(valid) ? load<W>(weights + s * W) : nothing;
    best = x > best ? x : best;
    store<W>(weights + s * W, x);
  }
  const float before = *scratch.maximum(row);
  const float tile_best = max_lane<W>(best);
  const float now = before < tile_best ? tile_best : before;
  Floats<W> total = load<W>(scratch.denominator(row));
  if (now != before) {
    const Floats<W> shrink = exp_nonpositive<W>(fill<W>(before) - now);
    *scratch.maximum(row) = now;
    total *= shrink;
    float* sum = scratch.sum(row);
    for (int64_t d = 0; d < padded; d += W) store<W>(sum + d, load<W>(sum + d) * shrink);
  }
  for (int64_t s = 0; s < parts; ++s) {
    const Floats<W> p = exp_nonpositive<W>(load<W>(weights + s * W) - now);
    total += p;
    store<W>(weights + s * W, p);
  }
  store<W>(scratch.denominator(row), total);
}

// sum[r] += weights[r][from .. to-1] . V, for R neighbouring rows and C vectors' width of V.
template <int W, int R, int C>
PDCTL_INLINE void accumulate_panel(float* sum, const float* weights, const Tile<W>& tile,
                                   int64_t from, int64_t to, int64_t padded, int64_t column) {
  Floats<W> acc[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) acc[r][c] = load<W>(sum + r * padded + column + c * W);
  }
  for (int64_t n = from; n < to; ++n) {
    const float* v = tile.v[n / W] + n % W * padded + column;
    Floats<W> value[C];
    for (int c = 0; c < C; ++c) value[c] = load<W>(v + c * W);
    for (int r = 0; r < R; ++r) {
      const Floats<W> weight = fill<W>(weights[r * kTile + n]);
      for (int c = 0; c < C; ++c) acc[r][c] += weight * value[c];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store<W>(sum + r * padded + column + c * W, acc[r][c]);
  }
}

template <int W, int R>
PDCTL_INLINE void accumulate(float* sum, const float* weights, const Tile<W>& tile, int64_t from,
                             int64_t to, int64_t padded) {
  if (from >= to) return;
  constexpr int kWide = W == 16 ? 4 : 2;  // R x kWide sums stay in registers
  int64_t column = 0;
  for (; column + kWide * W <= padded; column += kWide * W) {
    accumulate_panel<W, R, kWide>(sum, weights, tile, from, to, padded, column);
  }
  for (; column < padded; column += W) {
    accumulate_panel<W, R, 1>(sum, weights, tile, from, to, padded, column);
  }
}

template <int W>
PDCTL_INLINE void load_queries(const Attention& a, const Group& group, int64_t kv_head,
                               int64_t padded, Scratch<W>& scratch) {
  const int64_t heads = a.num_heads / a.num_kv_heads;
  for (int64_t row = 0; row < group.count * heads; ++row) {
    const int64_t head = kv_head * heads + row % heads;
    const int64_t offset = ((group.first + row / heads) * a.num_heads + head) * a.head_dim;
    float* query = scratch.query(row);
    if (a.query_bf16) {
      stage<W, true>(a.query, offset, a.head_dim, padded, query);
    } else {
      stage<W, false>(a.query, offset, a.head_dim, padded, query);
    }
    for (int64_t d = 0; d < padded; ++d) query[d] *= a.scale;
    for (int64_t d = 0; d < padded; d += W) store<W>(scratch.sum(row) + d, Floats<W>{});
    store<W>(scratch.denominator(row), Floats<W>{});
    *scratch.maximum(row) = -std::numeric_limits<float>::infinity();
  }
}

template <int W>
PDCTL_INLINE void store_results(const Attention& a, const Group& group, int64_t kv_head,
                                Scratch<W>& scratch) {
  const int64_t heads = a.num_heads / a.num_kv_heads;
  for (int64_t row = 0; row < group.count * heads; ++row) {
    const int64_t head = kv_head * heads + row % heads;
    const int64_t offset = ((group.first + row / heads) * a.num_heads + head) * a.head_dim;
    const float* sum = scratch.sum(row);
    const float total = sum_lanes<W>(load<W>(scratch.denominator(row)));
    if (a.query_bf16) {
      uint16_t* out = static_cast<uint16_t*>(a.out) + offset;
      for (int64_t d = 0; d < a.head_dim; ++d) out[d] = to_bf16(sum[d] / total);
    } else {
      float* out = static_cast<float*>(a.out) + offset;
      for (int64_t d = 0; d < a.head_dim; ++d) out[d] = sum[d] / total;
    }
  }
}

// One tile for R neighbouring rows, of which row r sees the first valid[r] positions.
template <int W, int R>
PDCTL_INLINE void attend_rows(Scratch<W>& scratch, int64_t row, const Tile<W>& tile,
                              const int64_t* valid, int64_t padded) {
  int64_t common = valid[0];
  int64_t most = valid[0];
  for (int r = 1; r < R; ++r) {
    common = smaller(common, valid[r]);
    most = larger(most, valid[r]);
  }
  if (most == 0) return;
  score_rows<W, R>(scratch.query(row), tile, most, padded, scratch.weights(0));
  for (int r = 0; r < R; ++r) {
    if (valid[r] > 0) weigh<W>(scratch, row + r, valid[r], padded, scratch.weights(r));
  }
  accumulate<W, R>(scratch.sum(row), scratch.weights(0), tile, 0, common, padded);
  for (int r = 0; r < R; ++r) {
    accumulate<W, 1>(scratch.sum(row + r), scratch.weights(r), tile, common, valid[r], padded);
  }
}

template <int W>
int64_t scratch_floats(int64_t head_dim) {
  return Scratch<W>::floats((head_dim + W - 1) / W * W);
}

template <int W, bool kBf16>
void attend_group(const Attention& a, const Group& group, int64_t kv_head, float* memory) {
  const int64_t padded = (a.head_dim + W - 1) / W * W;
  const int64_t heads = a.num_heads / a.num_kv_heads;
  const int64_t rows = group.count * heads;
  const int32_t* positions = a.positions + group.first;
  const int32_t* table = a.block_tables + a.seq_index[group.first] * a.max_blocks;
  int64_t end = 0;
  for (int64_t t = 0; t < group.count; ++t) end = larger(end, positions[t] + int64_t{1});
  Scratch<W> scratch(memory, padded);
  load_queries<W>(a, group, kv_head, padded, scratch);
  for (int64_t start = 0; start < end; start += kTile) {
    Tile<W> tile{};
    const int64_t count = smaller(kTile, end - start);
    find_tile<W, kBf16>(a, table, kv_head, start, count, padded, scratch, tile);
    if (rows >= kTransposeFrom) transpose_keys<W>(tile, count, padded, scratch.transposed());
    for (int64_t row = 0; row < rows; row += 4) {
      const int64_t together = smaller(4, rows - row);
      int64_t valid[4];
      for (int64_t r = 0; r < together; ++r) {
        const int64_t seen = positions[(row + r) / heads] + int64_t{1} - start;
        valid[r] = larger(0, smaller(seen, kTile));
      }
      switch (together) {
        case 4:
          attend_rows<W, 4>(scratch, row, tile, valid, padded);
          break;
        case 3:
          attend_rows<W, 3>(scratch, row, tile, valid, padded);
          break;
        case 2:
          attend_rows<W, 2>(scratch, row, tile, valid, padded);
          break;
        default:
          attend_rows<W, 1>(scratch, row, tile, valid, padded);
      }
    }
  }
  store_results<W>(a, group, kv_head, scratch);
}

}  // namespace pdctl
