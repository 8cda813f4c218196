// A compiled package as an object that torch's dispatcher calls. Before such a call torch releases
// the lock of the interpreter, so that other threads of Python work during a forward. The binding
// of AOTInductor's own loader holds the lock the whole time.
//
// It is compiled behind kernels.cpp, in one translation unit.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace {

// Not thread-safe. A method rather than an operator that takes the object: torch looks for Python
// in the arguments of such an operator, which takes 10 microseconds more per call.
class Package : public torch::CustomClassHolder {
 public:
  explicit Package(const std::string& file) : loader_(file, "model", /*run_single_threaded=*/false, /*num_runners=*/1, /*device_index=*/-1) {}

  // The names of the tensors that the package needs.
  std::vector<std::string> names() { return loader_.get_constant_fqns(); }

  // Let the package work on these tensors, without a copy. It has bare pointers to them, so they
  // are kept here.
  void bind(const c10::Dict<std::string, Tensor>& tensors) {
    for (const auto& entry : tensors) tensors_.insert_or_assign(entry.key(), entry.value());
    loader_.load_constants(tensors_, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  // tokens [t], slots [b], lengths [b], starts [b], columns [c], all int64 -> logits [c, vocab].
  Tensor run(const Tensor& tokens, const Tensor& slots, const Tensor& lengths, const Tensor& starts, const Tensor& columns) {
    return loader_.boxed_run({tokens, slots, lengths, starts, columns})[0];
  }

 private:
  std::unordered_map<std::string, Tensor> tensors_;
  torch::inductor::AOTIModelPackageLoader loader_;
};

}  // namespace

#define REGISTER_MORE(name, library) TORCH_LIBRARY_FRAGMENT(name, library)

REGISTER_MORE(TOOLKIT_NAMESPACE, library) {
  library.class_<Package>("Package")
      .def(torch::init<const std::string&>())
      .def("names", &Package::names)
      .def("bind", &Package::bind)
      .def("run", &Package::run);
}
