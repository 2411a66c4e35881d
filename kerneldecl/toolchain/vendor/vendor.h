// Owns what the calls of vendors' libraries share: errors, finding a library when it is first called.
// Knows nothing of any one library. Compiled without TVM's headers: what is declared here is tvm_ffi's stable C interface.
#pragma once
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

extern "C" {

// TVMFFIAny: a value of a type.
struct Any {
  int32_t type_index;
  uint32_t small_size;
  union {
    int64_t number;
    void* pointer;
    const char* text;
  };
};

struct Bytes {  // TVMFFIByteArray
  const char* data;
  size_t size;
};

void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
int TVMFFIFunctionGetGlobal(const Bytes* name, void** function);
int TVMFFIFunctionCall(void* function, Any* arguments, int32_t count, Any* result);
int TVMFFIObjectDecRef(void* object);
void* TVMFFIEnvGetStream(int32_t device_type, int32_t device_id);
}

namespace {

constexpr int kRawText = 8;  // kTVMFFIRawStr

int failed(const char* message) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

template <typename... Values>
int failed(const char* format, Values... values) {
  char message[1024];
  snprintf(message, sizeof(message), format, values...);
  return failed(static_cast<const char*>(message));
}

// Whether a version is the declared one: 13.1 is also declared by 13, and 13.10 is not declared by 13.1.
bool is_version(const char* found, const char* declared) {
  const size_t length = strlen(declared);
  return strncmp(found, declared, length) == 0 && (found[length] == 0 || found[length] == '.');
}

// Has Python, where the process is one, load a library from the package that holds it; then it is found by its soname.
void load_from_package(const char* soname) {
  constexpr char kName[] = "kerneldecl.load_vendor_library";
  const Bytes name = {kName, sizeof(kName) - 1};
  void* function = nullptr;
  if (TVMFFIFunctionGetGlobal(&name, &function) != 0 || !function) return;
  Any argument = {}, result = {};
  argument.type_index = kRawText;
  argument.text = soname;
  TVMFFIFunctionCall(function, &argument, 1, &result);  // a failure shows where the library is opened
  TVMFFIObjectDecRef(function);
}

// Returns the library that the process has loaded already, else that of an installed package, else that of the linker's search path: a
// package's version is the one that its environment asks for. No lock may be held: Python is called, and another thread may wait for the
// lock with the interpreter's.
void* opened(const char* soname) {
  if (void* library = dlopen(soname, RTLD_NOW | RTLD_NOLOAD)) return library;
  load_from_package(soname);
  return dlopen(soname, RTLD_NOW | RTLD_LOCAL);
}

struct Lock {
  explicit Lock(pthread_mutex_t* mutex) : mutex(mutex) { pthread_mutex_lock(mutex); }
  ~Lock() { pthread_mutex_unlock(mutex); }
  pthread_mutex_t* mutex;
};

}  // namespace
