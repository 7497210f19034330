// Built for AVX-512 (F, VL, BW, DQ); see CMakeLists.txt.
#include "attention_kernel.h"

namespace pdctl {

const Kernels kAvx512Kernels = {attend_group<16, false>, attend_group<16, true>,
                                scratch_floats<16>};

}  // namespace pdctl
