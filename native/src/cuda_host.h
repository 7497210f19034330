// Page-locks host memory for the GPU through the driver, found at run time: no toolkit is needed to
// build, and a host without a GPU is not an error.
#pragma once

#include <cstddef>
#include <string>

namespace pdctl {

enum class CudaHost { kAbsent, kRegistered, kFailed };

// Registers the range for every context of this process. On kFailed `error` is the driver's.
CudaHost cuda_register(void* address, size_t nbytes, std::string* error);

// Undoes cuda_register. Never fails: a driver that is already shut down has released the range.
void cuda_unregister(void* address) noexcept;

}  // namespace pdctl
