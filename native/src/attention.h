// Causal attention of single tokens over a paged KV pool, on the CPU. Knows blocks, not requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pdctl {

struct Attention {
  // (num_tokens, num_heads, head_dim), contiguous; float, or bfloat16 as its 16 bits.
  const void* query;
  void* out;
  bool query_bf16;

  // One layer's view of the pool: (num_blocks, 2, num_kv_heads, block_size, head_dim), of which the
  // last two axes are contiguous. Strides in elements.
  const void* kv;
  bool kv_bf16;
  int64_t block_stride;
  int64_t value_stride;  // from a K to its V
  int64_t head_stride;
  int64_t num_blocks;
  int64_t block_size;

  const int32_t* block_tables;  // (num_seqs, max_blocks)
  int64_t num_seqs;
  int64_t max_blocks;
  const int32_t* seq_index;  // (num_tokens,)
  const int32_t* positions;  // (num_tokens,)

  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;
};

// What is wrong with the indices (rows, positions, block ids), or nothing.
std::string check_indices(const Attention& a);

// Needs indices that passed check_indices. A token's result does not depend on the others' or on
// num_threads, to the bit.
void attend(const Attention& a, size_t num_threads);

}  // namespace pdctl
