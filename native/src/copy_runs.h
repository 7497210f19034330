// Scattered copies between two pieces of memory. Knows offsets and lengths, not blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdctl {

struct Run {
  int64_t src_offset;
  int64_t dst_offset;
  int64_t length;
};

// Index of the first run that does not lie inside both sides, or -1.
int64_t first_bad_run(const Run* runs, size_t count, uint64_t dst_nbytes, uint64_t src_nbytes);

// Copies all runs, which first_bad_run has passed; returns the bytes copied.
uint64_t copy_runs(std::byte* dst, const std::byte* src, const Run* runs, size_t count);

}  // namespace pdctl
