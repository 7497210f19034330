// The Python face of put_stream.
#pragma once

#include <nanobind/nanobind.h>

namespace pdctl {

void bind_put_stream(nanobind::module_& m);

}  // namespace pdctl
