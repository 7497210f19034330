/* A GPU driver that only keeps books, for hosts without one. FAKE_CUDA_DEVICES is the number of
   devices, FAKE_CUDA_FAIL makes registration fail; what is open is printed by fake_cuda_books. */
#include <stdio.h>
#include <stdlib.h>

static int retained, depth, registered;
static void *current;

int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) {
  const char *devices = getenv("FAKE_CUDA_DEVICES");
  *count = devices ? atoi(devices) : 1;
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
  ++retained;
  *context = &retained;
  return device;
}
int cuCtxPushCurrent_v2(void *context) { current = context; ++depth; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = current; current = 0; --depth; return 0; }
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
  (void)address;
  if (getenv("FAKE_CUDA_FAIL") || !current || !size || flags != 1) return 2;
  ++registered;
  return 0;
}
int cuMemHostUnregister(void *address) {
  (void)address;
  --registered;
  return current ? 0 : 201;
}
int cuGetErrorName(int error, const char **name) {
  *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
void fake_cuda_books(char *out, size_t size) {
  snprintf(out, size, "retained=%d depth=%d registered=%d", retained, depth, registered);
}
