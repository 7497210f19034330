#include "put_stream_binding.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "put_stream.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace pdctl {
namespace {

using RunArray = nb::ndarray<const int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using NoLock = nb::call_guard<nb::gil_scoped_release>;

void send_checked(int fd, uint64_t nonce, uintptr_t address, uint64_t nbytes,
                  const RunArray& array) {
  const auto* runs = reinterpret_cast<const Run*>(array.data());
  const size_t count = array.shape(0);
  const nb::gil_scoped_release release;
  const int64_t bad = first_bad_source(runs, count, nbytes);
  if (bad >= 0) {
    throw std::invalid_argument("run " + std::to_string(bad) + " (" +
                                std::to_string(runs[bad].length) + " bytes at " +
                                std::to_string(runs[bad].src_offset) + ") is outside of " +
                                std::to_string(nbytes) + " bytes");
  }
  send_put(fd, nonce, reinterpret_cast<const std::byte*>(address), runs, count);
}

}  // namespace

void bind_put_stream(nb::module_& m) {
  m.def("send_put", &send_checked, "fd"_a, "nonce"_a, "address"_a, "nbytes"_a,
        "runs"_a.noconvert());
  nb::class_<PutHeader>(m, "PutHeader")
      .def_ro("nonce", &PutHeader::nonce)
      .def_prop_ro("nbytes", &PutHeader::nbytes);
  m.def("receive_header", &receive_header, "fd"_a, NoLock());
  m.def("discard_put", &discard_put, "fd"_a, "put"_a, NoLock());
  nb::class_<Landing>(m, "Landing")
      .def(
          "__init__",
          [](Landing* self, uintptr_t address, uint64_t nbytes, uint64_t block_bytes,
             const std::vector<int64_t>& blocks) {
            new (self) Landing(reinterpret_cast<std::byte*>(address), nbytes, block_bytes, blocks);
          },
          "address"_a, "nbytes"_a, "block_bytes"_a, "blocks"_a)
      .def_prop_ro("complete", &Landing::complete)
      .def("close", &Landing::close, NoLock())
      .def("claim", &Landing::claim, "put"_a, NoLock())
      .def("receive", &Landing::receive, "fd"_a, "put"_a, NoLock());
}

}  // namespace pdctl
