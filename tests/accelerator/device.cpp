// An accelerator for tests, `strict`: a separate device for PyTorch, whose memory and arithmetic are the CPU's.
//
// As on a GPU, an operation with tensors of both devices is rejected, except for zero-dimensional tensors and indices.
// Every operation runs on the CPU, over the same memory.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <unordered_map>

namespace {

constexpr auto kStrict = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(kStrict, 0);

// --- memory: that of the CPU, under the device's name ----------------------------------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr held = c10::GetCPUAllocator()->allocate(size);
    void* at = held.get();
    return {at, held.release_context(), c10::GetCPUAllocator()->raw_deleter(), DEVICE};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(kStrict, &memory);

// A tensor over the same memory on the other device.
at::Tensor twin(const at::Tensor& tensor, c10::Device device, c10::DispatchKeySet keys, c10::Allocator* allocator) {
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(owner->mutable_data(), owner, [](void* held) { delete static_cast<c10::Storage*>(held); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(data), allocator, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  return twin(tensor, c10::kCPU, c10::DispatchKeySet(c10::DispatchKey::CPU), c10::GetCPUAllocator());
}

at::Tensor on_device(const at::Tensor& tensor) {
  c10::DispatchKeySet keys{c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1};
  return twin(tensor, DEVICE, keys, &memory);
}

void take_over(const at::Tensor& tensor, const at::Tensor& other) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(other.storage());
  impl->set_storage_offset(other.storage_offset());
  impl->set_sizes_and_strides(other.sizes(), other.strides());
}

// --- every operation not below: on CPU tensors over the same memory --------------------------------------------------

class Operation {
 public:
  Operation(const c10::OperatorHandle& handle, torch::jit::Stack* stack) : handle_(handle), stack_(stack) {}

  void run() {
    const auto& arguments = handle_.schema().arguments();
    const size_t first = stack_->size() - arguments.size();
    for (size_t number = 0; number < arguments.size(); number++) {
      auto& value = (*stack_)[first + number];
      const std::string& name = arguments[number].name();
      if (value.isDevice()) {
        value = c10::Device(c10::kCPU);
      } else {
        value = each_tensor(value, [&](const at::Tensor& tensor) { return taken(tensor, name); });
      }
    }
    handle_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    const size_t num_results = handle_.schema().returns().size();
    for (size_t at = stack_->size() - num_results; at < stack_->size(); at++) {
      (*stack_)[at] = each_tensor((*stack_)[at], [&](const at::Tensor& tensor) { return given(tensor); });
    }
  }

 private:
  template <typename Function>
  static c10::IValue each_tensor(const c10::IValue& value, Function change) {
    if (value.isTensor()) return change(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector()) {
        list.push_back(item.has_value() ? std::optional(change(*item)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  at::Tensor taken(const at::Tensor& tensor, const std::string& argument) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() == kStrict) {
      auto made = on_cpu(tensor);
      ours_.emplace(made.unsafeGetTensorImpl(), tensor);
      return made;
    }
    TORCH_CHECK(tensor.dim() == 0 || argument == "indices", handle_.schema().name(), ": ", argument, " of size ",
                tensor.sizes(), " is on ", tensor.device(), ", and others are on ", DEVICE);
    return tensor;
  }

  at::Tensor given(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto found = ours_.find(tensor.unsafeGetTensorImpl());
    if (found == ours_.end()) return on_device(tensor);
    if (found->second.sizes() != tensor.sizes()) take_over(found->second, on_device(tensor));
    return found->second;
  }

  const c10::OperatorHandle& handle_;
  torch::jit::Stack* stack_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> ours_;
};

void run_on_cpu(const c10::OperatorHandle& handle, torch::jit::Stack* stack) { Operation(handle, stack).run(); }

// --- operations that create tensors, move them, and view them --------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return on_device(at::empty(size, at::TensorOptions().dtype(dtype).device(c10::kCPU), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return on_device(at::empty_strided(size, stride, at::TensorOptions().dtype(dtype).device(c10::kCPU)));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  auto here = [](const at::Tensor& tensor) { return tensor.device().type() == kStrict ? on_cpu(tensor) : tensor; };
  here(target).copy_(here(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  return copy_from(source, target, false);
}

at::Scalar number(const at::Tensor& tensor) { return at::_local_scalar_dense(on_cpu(tensor)); }

const at::Tensor& resize(const at::Tensor& tensor, at::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  at::Tensor larger = on_device(at::zeros(C10_AS_INTARRAYREF_SLOW(size), tensor.options().device(c10::kCPU)));
  const auto kept = std::min(tensor.nbytes(), larger.nbytes());
  if (kept) std::memcpy(larger.mutable_data_ptr(), tensor.const_data_ptr(), kept);
  take_over(tensor, larger);
  return tensor;
}

at::Tensor as_strided(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

at::Tensor view(const at::Tensor& tensor, at::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor& set_to(at::Tensor& tensor, at::Storage storage, at::SymInt offset, at::SymIntArrayRef size,
                   at::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}

at::Tensor& set_to_storage(at::Tensor& tensor, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({length});
  return tensor;
}

at::Tensor& set_to_tensor(at::Tensor& tensor, const at::Tensor& other) {
  take_over(tensor, other);
  return tensor;
}

// --- the device itself: a single one, with one stream that is always finished ----------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kStrict;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kStrict; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  // Its random numbers are the CPU's.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
Hooks hooks;

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// No operation rounds under autocast here.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", number);
  library.impl("resize_", resize);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", set_to);
  library.impl("set_.source_Storage", set_to_storage);
  library.impl("set_.source_Tensor", set_to_tensor);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { at::RegisterPrivateUse1HooksInterface(&hooks); }
