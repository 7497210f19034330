// Python arrays to Attention: dtypes, shapes and strides are checked here.
#include "attention_binding.h"

#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "attention.h"
#include "attention_kernels.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace pdctl {
namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig, nb::ndim<3>>;
using Output = nb::ndarray<nb::device::cpu, nb::c_contig, nb::ndim<3>>;
using Pool = nb::ndarray<nb::ro, nb::device::cpu, nb::ndim<5>>;
using Table = nb::ndarray<const int32_t, nb::device::cpu, nb::c_contig, nb::ndim<2>>;
using Index = nb::ndarray<const int32_t, nb::device::cpu, nb::c_contig, nb::ndim<1>>;

void require(bool fine, const char* message) {
  if (!fine) throw std::invalid_argument(message);
}

bool is_bf16(const nb::dlpack::dtype& type, const char* name) {
  const bool bf16 =
      type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16;
  const bool f32 =
      type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 32;
  if (bf16 == f32 || type.lanes != 1) {
    throw std::invalid_argument(std::string(name) + " must be float32 or bfloat16");
  }
  return bf16;
}

Attention describe(const Array& query, const Pool& kv, const Table& tables, const Index& seq_index,
                   const Index& positions, Output& out, float scale) {
  Attention a{};
  a.query = query.data();
  a.out = out.data();
  a.query_bf16 = is_bf16(query.dtype(), "query");
  a.num_tokens = static_cast<int64_t>(query.shape(0));
  a.num_heads = static_cast<int64_t>(query.shape(1));
  a.head_dim = static_cast<int64_t>(query.shape(2));
  require(out.dtype() == query.dtype() && out.shape(0) == query.shape(0) &&
              out.shape(1) == query.shape(1) && out.shape(2) == query.shape(2),
          "out must have query's shape and dtype");

  a.kv = kv.data();
  a.kv_bf16 = is_bf16(kv.dtype(), "kv");
  a.num_blocks = static_cast<int64_t>(kv.shape(0));
  a.num_kv_heads = static_cast<int64_t>(kv.shape(2));
  a.block_size = static_cast<int64_t>(kv.shape(3));
  a.block_stride = kv.stride(0);
  a.value_stride = kv.stride(1);
  a.head_stride = kv.stride(2);
  require(a.num_heads > 0 && a.head_dim > 0 && a.num_kv_heads > 0 && a.block_size > 0,
          "query and kv must not have empty axes");
  require(kv.shape(1) == 2, "kv's second axis must be K and V");
  require(static_cast<int64_t>(kv.shape(4)) == a.head_dim, "kv and query differ in head_dim");
  require(kv.stride(4) == 1 && (a.block_size == 1 || kv.stride(3) == a.head_dim),
          "kv's tokens and dims must be contiguous");
  require(a.num_heads % a.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  require(a.num_heads / a.num_kv_heads <= kMaxRows, "at most 64 heads can share a KV head");

  a.block_tables = tables.data();
  a.num_seqs = static_cast<int64_t>(tables.shape(0));
  a.max_blocks = static_cast<int64_t>(tables.shape(1));
  a.seq_index = seq_index.data();
  a.positions = positions.data();
  require(static_cast<int64_t>(seq_index.shape(0)) == a.num_tokens &&
              static_cast<int64_t>(positions.shape(0)) == a.num_tokens,
          "seq_index and positions must have one entry per token");
  a.scale = scale;
  return a;
}

void paged_attention(const Array& query, const Pool& kv, const Table& block_tables,
                     const Index& seq_index, const Index& positions, Output& out, float scale,
                     int64_t num_threads) {
  const Attention a = describe(query, kv, block_tables, seq_index, positions, out, scale);
  require(num_threads >= 1, "num_threads must be at least 1");
  nb::gil_scoped_release release;
  const std::string wrong = check_indices(a);
  if (!wrong.empty()) throw std::invalid_argument(wrong);
  attend(a, static_cast<size_t>(num_threads));
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("paged_attention", &paged_attention, "query"_a.noconvert(), "kv"_a.noconvert(),
        "block_tables"_a.noconvert(), "seq_index"_a.noconvert(), "positions"_a.noconvert(),
        "out"_a.noconvert(), "scale"_a, "num_threads"_a);
}

}  // namespace pdctl
