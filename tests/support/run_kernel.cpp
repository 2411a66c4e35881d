// Calls one kernel of an artifact's library in place of TVM's runtime, to be run by an emulator of another machine.
//
//   run_kernel LIBRARY SYMBOL ARGUMENT…     an argument is FILE:CODE:BITS:EXTENT,EXTENT,… (DLPack's type code); files are read and written back
//
// Parallel loops run one task after the other.
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kTasks = 3;

struct Environment {
  void* sync_handle;
  std::int32_t num_task;
};

int Launch(int (*task)(int, Environment*, void*), void* data, int tasks) {
  Environment environment{nullptr, tasks == 0 ? kTasks : tasks};
  for (int at = 0; at < environment.num_task; ++at) {
    if (int failed = task(at, &environment, data)) return failed;
  }
  return 0;
}

void* Allocate(int, int, std::uint64_t bytes, int, int) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }

int Release(int, int, void* memory) {
  std::free(memory);
  return 0;
}

void Provide(void* library, const char* name, void* function) {
  if (void* place = dlsym(library, name)) *static_cast<void**>(place) = function;
}

struct Argument {
  std::string file;
  std::vector<char> content;
  std::vector<std::int64_t> shape;
  DLTensor tensor{};
};

Argument Read(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ':');) parts.push_back(part);
  Argument made;
  made.file = parts[0];
  std::ifstream file(made.file, std::ios::binary);
  made.content.assign(std::istreambuf_iterator<char>(file), {});
  std::stringstream extents(parts[3]);
  for (std::string extent; std::getline(extents, extent, ',');) made.shape.push_back(std::stoll(extent));
  made.tensor.dtype = {static_cast<std::uint8_t>(std::stoi(parts[1])), static_cast<std::uint8_t>(std::stoi(parts[2])), 1};
  made.tensor.device = {kDLCPU, 0};
  return made;
}

}  // namespace

extern "C" void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, std::int32_t count) {
  std::fprintf(stderr, "%s: ", kind);
  for (int at = 0; at < count; ++at) std::fputs(parts[at], stderr);
  std::fputc('\n', stderr);
}

int main(int count, char** given) {
  void* library = dlopen(given[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  Provide(library, "__TVMBackendParallelLaunch", reinterpret_cast<void*>(&Launch));
  Provide(library, "__TVMBackendAllocWorkspace", reinterpret_cast<void*>(&Allocate));
  Provide(library, "__TVMBackendFreeWorkspace", reinterpret_cast<void*>(&Release));
  const std::string symbol = std::string("__tvm_ffi_") + given[2];
  auto* kernel = reinterpret_cast<TVMFFISafeCallType>(dlsym(library, symbol.c_str()));
  if (kernel == nullptr) return std::fprintf(stderr, "no %s\n", symbol.c_str()), 2;
  std::vector<Argument> arguments;
  for (int at = 3; at < count; ++at) arguments.push_back(Read(given[at]));
  std::vector<TVMFFIAny> values(arguments.size());
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    Argument& each = arguments[at];
    each.tensor.data = each.content.data();
    each.tensor.ndim = static_cast<std::int32_t>(each.shape.size());
    each.tensor.shape = each.shape.data();
    values[at].type_index = kTVMFFIDLTensorPtr;
    values[at].v_ptr = &each.tensor;
  }
  TVMFFIAny result{};
  if (kernel(nullptr, values.data(), static_cast<std::int32_t>(values.size()), &result) != 0) return 1;
  for (const Argument& each : arguments) std::ofstream(each.file, std::ios::binary).write(each.content.data(), each.content.size());
  return 0;
}
