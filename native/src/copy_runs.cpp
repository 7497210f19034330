#include "copy_runs.h"

#include <cstring>

namespace pdctl {
namespace {

// Written so that nothing can overflow: offset + length is never formed.
bool inside(int64_t offset, int64_t length, uint64_t nbytes) {
  return offset >= 0 && length >= 0 && static_cast<uint64_t>(offset) <= nbytes &&
         static_cast<uint64_t>(length) <= nbytes - static_cast<uint64_t>(offset);
}

}  // namespace

int64_t first_bad_run(const Run* runs, size_t count, uint64_t dst_nbytes, uint64_t src_nbytes) {
  for (size_t i = 0; i < count; ++i) {
    if (!inside(runs[i].src_offset, runs[i].length, src_nbytes) ||
        !inside(runs[i].dst_offset, runs[i].length, dst_nbytes)) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

uint64_t copy_runs(std::byte* dst, const std::byte* src, const Run* runs, size_t count) {
  uint64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    // memmove: a run may overlap itself when both sides are one pool.
    std::memmove(dst + runs[i].dst_offset, src + runs[i].src_offset,
                 static_cast<size_t>(runs[i].length));
    total += static_cast<uint64_t>(runs[i].length);
  }
  return total;
}

}  // namespace pdctl
