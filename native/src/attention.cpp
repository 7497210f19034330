#include "attention.h"

#include <algorithm>
#include <vector>

#include "attention_kernels.h"
#include "thread_pool.h"

namespace pdctl {
namespace {

// Below this many multiplications per thread, waking one costs more than it saves (measured: about
// 20 us to wake, 20 to 40 multiplications a nanosecond).
constexpr int64_t kWorkPerThread = int64_t{1} << 20;

const Kernels& choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) {
    return kAvx512Kernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2Kernels;
#endif
  return kPortableKernels;
}

// Neighbouring tokens of one sequence, at most kMaxRows rows together.
std::vector<Group> group_tokens(const Attention& a) {
  const int64_t most = std::max<int64_t>(1, kMaxRows / (a.num_heads / a.num_kv_heads));
  std::vector<Group> groups;
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    if (!groups.empty() && groups.back().count < most &&
        a.seq_index[groups.back().first] == a.seq_index[t]) {
      ++groups.back().count;
    } else {
      groups.push_back({t, 1});
    }
  }
  return groups;
}

}  // namespace

std::string check_indices(const Attention& a) {
  std::vector<int64_t> used(static_cast<size_t>(a.num_seqs), 0);  // blocks per sequence
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const int64_t seq = a.seq_index[t];
    const int64_t position = a.positions[t];
    if (seq < 0 || seq >= a.num_seqs) {
      return "token " + std::to_string(t) + ": seq_index " + std::to_string(seq) +
             " is not a row of block_tables";
    }
    if (position < 0 || position / a.block_size >= a.max_blocks) {
      return "token " + std::to_string(t) + ": position " + std::to_string(position) +
             " is outside its " + std::to_string(a.max_blocks) + " blocks";
    }
    used[seq] = std::max(used[seq], position / a.block_size + 1);
  }
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    for (int64_t b = 0; b < used[s]; ++b) {
      const int64_t block = a.block_tables[s * a.max_blocks + b];
      if (block < 0 || block >= a.num_blocks) {
        return "block_tables[" + std::to_string(s) + ", " + std::to_string(b) + "] is " +
               std::to_string(block) + ", the pool has " + std::to_string(a.num_blocks) + " blocks";
      }
    }
  }
  return {};
}

void attend(const Attention& a, size_t num_threads) {
  static const Kernels& kernels = choose();
  const Kernel kernel = a.kv_bf16 ? kernels.bf16 : kernels.f32;
  const size_t floats = static_cast<size_t>(kernels.scratch_floats(a.head_dim));
  const std::vector<Group> groups = group_tokens(a);
  int64_t work = 0;
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    work += 2 * (a.positions[t] + int64_t{1}) * a.num_heads * a.head_dim;
  }
  const size_t useful = static_cast<size_t>(1 + work / kWorkPerThread);
  const size_t items = groups.size() * static_cast<size_t>(a.num_kv_heads);
  ThreadPool::instance().run(items, std::min(num_threads, useful), [&](size_t i) {
    static thread_local std::vector<float> memory;
    if (memory.size() < floats) memory.resize(floats);
    // Last first: in a prompt the later tokens are the longer work.
    const size_t item = items - 1 - i;
    kernel(a, groups[item / a.num_kv_heads], static_cast<int64_t>(item % a.num_kv_heads),
           memory.data());
  });
}

}  // namespace pdctl
