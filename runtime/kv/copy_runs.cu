// Many small copies as one kernel: runs of {source offset, destination offset, length} in bytes,
// disjoint at the destination. A run belongs to one block of the grid's x; its y parts share it.
extern "C" __global__ void copy_runs(char* to, const char* from, const long long* runs,
                                     long long count) {
  const long long first = (long long)blockIdx.y * blockDim.x + threadIdx.x;
  const long long step = (long long)gridDim.y * blockDim.x;
  for (long long r = blockIdx.x; r < count; r += gridDim.x) {
    const char* src = from + runs[3 * r];
    char* dst = to + runs[3 * r + 1];
    const long long nbytes = runs[3 * r + 2];
    long long done = 0;
    if (((unsigned long long)src | (unsigned long long)dst) % sizeof(int4) == 0) {
      const long long wide = nbytes / (long long)sizeof(int4);
      for (long long i = first; i < wide; i += step) ((int4*)dst)[i] = ((const int4*)src)[i];
      done = wide * (long long)sizeof(int4);
    }
    for (long long i = done + first; i < nbytes; i += step) dst[i] = src[i];
  }
}
