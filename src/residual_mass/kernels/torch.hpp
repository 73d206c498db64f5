// What an operation of torch's dispatcher needs of torch, without its headers: functions in C whose interface torch keeps
// (torch/csrc/inductor/aoti_torch/c/shim.h), at addresses that `operations.py` gives.
//
// An operation gets a stack of its arguments, of 64 bits each: integers, and handles of tensors, which are its own to
// release. It leaves its result there, as a new handle.
#pragma once
#include <new>
#include <stdexcept>
#include <utility>

namespace {

// In the order of `FUNCTIONS` in operations.py. All of them return 0, or another number after an error.
struct Torch {
  int32_t (*data)(void*, void**);
  int32_t (*dimensions)(void*, int64_t*);
  int32_t (*sizes)(void*, int64_t**);
  int32_t (*type)(void*, int32_t*);
  int32_t (*contiguous)(void*, bool*);
  int32_t (*make)(int64_t, const int64_t* sizes, const int64_t* strides, int32_t type, int32_t device, int32_t index, void**);
  int32_t (*release)(void*);
  int64_t float32, bfloat16;  // numbers of types
} torch_functions;

constexpr int MOST_DIMENSIONS = 8;
constexpr int CPU_DEVICE = 0;

// A tensor of the dispatcher's.
struct Handle {
  void* handle;

  explicit Handle(uint64_t value) : handle((void*)value) {}
  template <class Number>
  Number asked(int32_t (*function)(void*, Number*)) const {
    Number answer{};
    if (function(handle, &answer)) throw std::runtime_error("torch does not answer about a tensor");
    return answer;
  }
  void* data() const { return asked(torch_functions.data); }
  int64_t dimensions() const { return asked(torch_functions.dimensions); }
  const int64_t* sizes() const { return asked(torch_functions.sizes); }
  int32_t type() const { return asked(torch_functions.type); }
  bool contiguous() const { return asked(torch_functions.contiguous); }
};

// One that is released with this.
struct Tensor : Handle {
  using Handle::Handle;
  Tensor(const Tensor&) = delete;
  ~Tensor() { if (handle) torch_functions.release(handle); }
};

// Returns the handle of a new contiguous tensor.
uint64_t made(int64_t dimensions, const int64_t* sizes, int32_t type) {
  int64_t strides[MOST_DIMENSIONS], stride = 1;
  for (int i = dimensions - 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  void* handle;
  if (torch_functions.make(dimensions, sizes, strides, type, CPU_DEVICE, -1, &handle)) throw std::bad_alloc();
  return (uint64_t)handle;
}

}  // namespace
