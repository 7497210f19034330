#include "cuda_host.h"

#include <dlfcn.h>

namespace pdctl {
namespace {

// The few declarations of cuda.h that are used here; its ABI is stable.
using Result = int;
using Context = void*;
constexpr Result kSuccess = 0;
constexpr unsigned kPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE

struct Driver {
  Result (*init)(unsigned) = nullptr;
  Result (*device_count)(int*) = nullptr;
  Result (*current)(Context*) = nullptr;
  Result (*retain)(Context*, int) = nullptr;
  Result (*push)(Context) = nullptr;
  Result (*pop)(Context*) = nullptr;
  Result (*host_register)(void*, size_t, unsigned) = nullptr;
  Result (*host_unregister)(void*) = nullptr;
  Result (*error_name)(Result, const char**) = nullptr;
  bool present = false;
};

template <typename F>
bool find(void* library, const char* symbol, F& function) {
  function = reinterpret_cast<F>(dlsym(library, symbol));
  return function != nullptr;
}

Driver load_driver() {
  Driver d;
  // Never closed: the driver does not survive being unloaded.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return d;
  const bool complete =
      find(library, "cuInit", d.init) && find(library, "cuDeviceGetCount", d.device_count) &&
      find(library, "cuCtxGetCurrent", d.current) &&
      find(library, "cuDevicePrimaryCtxRetain", d.retain) &&
      find(library, "cuCtxPushCurrent_v2", d.push) && find(library, "cuCtxPopCurrent_v2", d.pop) &&
      find(library, "cuMemHostRegister_v2", d.host_register) &&
      find(library, "cuMemHostUnregister", d.host_unregister) &&
      find(library, "cuGetErrorName", d.error_name);
  int devices = 0;
  d.present = complete && d.init(0) == kSuccess && d.device_count(&devices) == kSuccess &&
              devices > 0;
  return d;
}

const Driver& driver() {
  static const Driver loaded = load_driver();
  return loaded;
}

struct Primary {
  Context context = nullptr;
  Result result = kSuccess;
};

// The first visible device's primary context, which torch uses too. Retained once and for the life
// of the process: registrations live as long as it.
const Primary& primary(const Driver& d) {
  static const Primary retained = [&d] {
    Primary p;
    p.result = d.retain(&p.context, 0);
    return p;
  }();
  return retained;
}

// Makes a context current for its lifetime, unless the calling thread has one.
class CurrentContext {
 public:
  explicit CurrentContext(const Driver& d) : d_(d) {
    Context context = nullptr;
    if (d_.current(&context) == kSuccess && context != nullptr) return;
    result_ = primary(d_).result;
    if (result_ == kSuccess) result_ = d_.push(primary(d_).context);
    pushed_ = result_ == kSuccess;
  }
  ~CurrentContext() {
    Context ignored = nullptr;
    if (pushed_) d_.pop(&ignored);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  Result result() const { return result_; }

 private:
  const Driver& d_;
  Result result_ = kSuccess;
  bool pushed_ = false;
};

}  // namespace

CudaHost cuda_register(void* address, size_t nbytes, std::string* error) {
  const Driver& d = driver();
  if (!d.present) return CudaHost::kAbsent;
  const CurrentContext context(d);
  Result result = context.result();
  if (result == kSuccess) result = d.host_register(address, nbytes, kPortable);
  if (result == kSuccess) return CudaHost::kRegistered;
  const char* name = nullptr;
  *error = d.error_name(result, &name) == kSuccess && name != nullptr
               ? std::string(name)
               : "CUDA error " + std::to_string(result);
  return CudaHost::kFailed;
}

void cuda_unregister(void* address) noexcept {
  const Driver& d = driver();
  if (!d.present) return;
  const CurrentContext context(d);
  if (context.result() == kSuccess) d.host_unregister(address);
}

}  // namespace pdctl
