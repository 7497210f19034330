#pragma once

#include <nanobind/nanobind.h>

namespace pdctl {

void bind_attention(nanobind::module_& m);

}  // namespace pdctl
