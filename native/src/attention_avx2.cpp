// Built for AVX2 with FMA; see CMakeLists.txt.
#include "attention_kernel.h"

namespace pdctl {

const Kernels kAvx2Kernels = {attend_group<8, false>, attend_group<8, true>, scratch_floats<8>};

}  // namespace pdctl
