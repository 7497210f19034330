// The attention kernel's builds, one per instruction set; attention.cpp picks one at run time.
#pragma once

#include <cstdint>

#include "attention.h"

namespace pdctl {

// Neighbouring tokens of one sequence.
struct Group {
  int64_t first;
  int64_t count;
};

constexpr int64_t kMaxRows = 64;  // query heads x tokens that share the reading of K and V

using Kernel = void (*)(const Attention&, const Group&, int64_t kv_head, float* scratch);

struct Kernels {
  Kernel f32;
  Kernel bf16;
  int64_t (*scratch_floats)(int64_t head_dim);
};

extern const Kernels kPortableKernels;
extern const Kernels kAvx2Kernels;    // x86-64 only
extern const Kernels kAvx512Kernels;  // x86-64 only

}  // namespace pdctl
