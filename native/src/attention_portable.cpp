// Built for the baseline: SSE2 or NEON; see CMakeLists.txt.
#include "attention_kernel.h"

namespace pdctl {

const Kernels kPortableKernels = {attend_group<4, false>, attend_group<4, true>, scratch_floats<4>};

}  // namespace pdctl
