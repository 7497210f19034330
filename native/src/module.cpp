// The Python face of this folder: argument checks and the interpreter lock, no work of its own.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>

#include "attention_binding.h"
#include "copy_runs.h"
#include "pinned_shm.h"
#include "put_stream_binding.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace pdctl {
namespace {

using RunArray = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

void raise_os_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const SystemError& e) {
    // OSError(errno, text) picks the subclass: FileExistsError, PermissionError, ...
    PyObject* args = Py_BuildValue("(is)", e.number(), e.what());
    if (args == nullptr) return;
    PyErr_SetObject(PyExc_OSError, args);
    Py_DECREF(args);
  }
}

uintptr_t address_of(const PinnedShm& shm) {
  if (shm.address() == nullptr) {
    throw std::invalid_argument("shared memory segment " + shm.name() + " was freed");
  }
  return reinterpret_cast<uintptr_t>(shm.address());
}

const char* lock_name(const PinnedShm& shm) {
  switch (shm.lock()) {
    case PageLock::kCuda:
      return "cuda";
    case PageLock::kMlock:
      return "mlock";
    case PageLock::kNone:
      break;
  }
  return "none";
}

uint64_t copy_runs_checked(uintptr_t dst, uint64_t dst_nbytes, uintptr_t src, uint64_t src_nbytes,
                           const RunArray& array) {
  static_assert(sizeof(Run) == 3 * sizeof(int64_t));
  const auto* runs = reinterpret_cast<const Run*>(array.data());
  const size_t count = array.shape(0);
  nb::gil_scoped_release release;
  const int64_t bad = first_bad_run(runs, count, dst_nbytes, src_nbytes);
  if (bad >= 0) {
    const Run& run = runs[bad];
    throw std::invalid_argument(
        "run " + std::to_string(bad) + " (" + std::to_string(run.length) + " bytes from " +
        std::to_string(run.src_offset) + " to " + std::to_string(run.dst_offset) +
        ") is outside the source's " + std::to_string(src_nbytes) + " bytes or the destination's " +
        std::to_string(dst_nbytes));
  }
  return copy_runs(reinterpret_cast<std::byte*>(dst), reinterpret_cast<const std::byte*>(src), runs,
                   count);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator(raise_os_error);

  nb::class_<PinnedShm>(m, "PinnedShm")
      .def_prop_ro("name", &PinnedShm::name)
      .def_prop_ro("address", &address_of)
      .def_prop_ro("nbytes", &PinnedShm::nbytes)
      .def_prop_ro("pinned", [](const PinnedShm& shm) { return shm.lock() != PageLock::kNone; })
      .def_prop_ro("lock", &lock_name);
  m.def("create_pinned_shm", &PinnedShm::create, "name"_a, "nbytes"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("open_pinned_shm", &PinnedShm::open, "name"_a, "nbytes"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("free_pinned_shm", &PinnedShm::free, "shm"_a, "unlink"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("copy_runs", &copy_runs_checked, "dst_address"_a, "dst_nbytes"_a, "src_address"_a,
        "src_nbytes"_a, "runs"_a.noconvert());
  bind_attention(m);
  bind_put_stream(m);
}

}  // namespace pdctl
