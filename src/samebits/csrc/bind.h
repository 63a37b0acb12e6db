// What every binding needs: array types (DLPack, no copies), and the row view of a tensor.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "counters.h"
#include "dispatch.h"

namespace nb = nanobind;

namespace samebits {

// Tensors arrive as addresses: the Python side (ops/<op>/cpu.py) has checked dtype, shape, strides and
// keeps them alive for the call. An address costs a tenth of a DLPack exchange, and a decode step of a
// small model makes a hundred of these calls.
using Address = uintptr_t;
template <class T> T* at(Address a) { return reinterpret_cast<T*>(a); }

using Release = nb::call_guard<nb::gil_scoped_release>;

}  // namespace samebits
