// A kind of device for tests, by PyTorch's mechanism for devices of others: its memory is the processor's, which only this file touches, and its
// operators are the CPU's on copies. What makes it worth having is that it is late. A copy that was asked for with non_blocking=True happens as late
// as a device may do it, and until then its target has other bytes: who reads it, or reuses its source, without waiting has wrong values each time.
//
// Each thread has a queue. An operator carries out what its thread has queued before; copies to the CPU that were not waited for come true only with
// synchronize(). Operators that say that they are for CPUs are refused.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int OTHER_BYTES = 0xA5;

// What it can be told to lack.
std::atomic<int64_t> room{-1};
std::atomic<c10::ScalarType> lacking{c10::ScalarType::Undefined};

void check_dtype(c10::ScalarType dtype) { TORCH_CHECK_TYPE(dtype != lacking, "the late device has no numbers of ", dtype); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    TORCH_CHECK(room < 0 || static_cast<int64_t>(size) <= room, "the late device is out of memory");
    void *at = size ? std::malloc(size) : nullptr;
    TORCH_CHECK(at || !size, "the late device is out of memory");
    if (at) std::memset(at, OTHER_BYTES, size);  // New memory of a device has any bytes.
    return {at, at, &std::free, c10::Device(KIND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void *to, const void *from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator)
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<KIND>)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator *getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t size) const override {
    auto fresh = allocator.allocate(size);
    std::memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// The same memory, as a tensor of the CPU.
at::Tensor seen(const at::Tensor &tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(const_cast<void *>(tensor.unsafeGetTensorImpl()->storage().data()), tensor.sizes(), tensor.strides(),
                       tensor.storage_offset(), [keep = tensor.storage()](void *) {}, tensor.options().device(c10::kCPU));
}

struct Copy {
  at::Tensor source, target;
  bool to_cpu;
};
std::mutex mutex;
std::map<int64_t, std::vector<Copy>> queues;
std::atomic<int64_t> threads{0}, late_copies{0};

int64_t mine() {
  thread_local int64_t number = ++threads;
  return number;
}

void drain(int64_t queue, bool all) {
  std::vector<Copy> taken, kept;
  {
    std::lock_guard<std::mutex> held(mutex);
    for (auto &each : queues[queue]) (all || !each.to_cpu ? taken : kept).push_back(std::move(each));
    queues[queue] = std::move(kept);
  }
  for (auto &each : taken) each.target.copy_(each.source);
}

at::Tensor copy_from(const at::Tensor &self, const at::Tensor &dst, bool non_blocking) {
  drain(mine(), !non_blocking && dst.is_cpu());
  auto source = seen(self), target = seen(dst);
  if (!non_blocking || self.device() == dst.device() || !target.is_non_overlapping_and_dense()) {
    target.copy_(source);
    return dst;
  }
  // What comes from the device has its values of now, what comes from the CPU those that it has when the device reads it.
  if (dst.is_cpu()) source = source.clone();
  std::memset(target.data_ptr(), OTHER_BYTES, target.nbytes());
  ++late_copies;
  std::lock_guard<std::mutex> held(mutex);
  queues[mine()].push_back({source, target, dst.is_cpu()});
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor &self, const at::Tensor &dst) {
  if (dst.sizes() != self.sizes()) at::native::resize_(dst, self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const at::Tensor &self) {
  drain(mine(), true);
  return seen(self).item();
}

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device>, std::optional<bool>) {
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor &self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

const at::Tensor &resize(const at::Tensor &self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

at::Tensor &set_storage(at::Tensor &self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}

at::Tensor convolution(const at::Tensor &input, const at::Tensor &weight, const std::optional<at::Tensor> &bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  drain(mine(), false);
  auto with = bias && bias->defined() ? std::optional<at::Tensor>(seen(*bias)) : std::nullopt;
  return at::convolution(seen(input), seen(weight), with, stride, padding, dilation, transposed, output_padding, groups).to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor &gradient, const at::Tensor &input, const at::Tensor &weight,
                                                                    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                                                                    bool transposed, c10::IntArrayRef output_padding, int64_t groups,
                                                                    std::array<bool, 3> mask) {
  drain(mine(), false);
  std::vector<int64_t> bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [one, two, three] = at::convolution_backward(seen(gradient), seen(input), seen(weight), c10::IntArrayRef(bias), stride, padding, dilation,
                                                    transposed, output_padding, groups, mask);
  auto there = [&](const at::Tensor &each) { return each.defined() ? each.to(input.device()) : each; };
  return {there(one), there(two), there(three)};
}

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
  const auto &name = op.schema().name();
  TORCH_CHECK(name.find("_for_cpu") == std::string::npos && name.find("mkldnn") == std::string::npos, name, " is for CPUs alone");
  drain(mine(), false);
  at::native::cpu_fallback(op, stack);
}

int64_t mark() { return mine(); }
void wait(int64_t queue) { drain(queue, false); }
void finish(int64_t queue) { drain(queue, true); }
void synchronize() { drain(mine(), true); }
void limit(int64_t size) { room = size; }
void lacks(std::optional<c10::ScalarType> dtype) { lacking = dtype.value_or(c10::ScalarType::Undefined); }
int64_t late() { return late_copies; }
void start() {
  static bool done = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    return true;
  }();
  (void)done;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::cpu::unfold));
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY(late, m) {
  m.def("start() -> ()", start);
  m.def("mark() -> int", mark);
  m.def("wait(int queue) -> ()", wait);
  m.def("finish(int queue) -> ()", finish);
  m.def("synchronize() -> ()", synchronize);
  m.def("late() -> int", late);
  m.def("limit(int nbytes) -> ()", limit);
  m.def("lacks(ScalarType? dtype) -> ()", lacks);
}

}  // namespace
