// Defines what g++ 12 on Debian 12 would take from the C and C++ libraries of
// that system, although TensorFlow's wheels run on older ones. Each library of
// this package has its own definitions, which are invisible outside of it.

#ifdef __linux__

// This comes before all headers, because the first declaration of a symbol
// decides its visibility.
namespace std {
[[noreturn, gnu::visibility("hidden")]] void __throw_bad_array_new_length();
}
extern "C" [[gnu::visibility("hidden")]] char __libc_single_threaded;

#include <new>

// Is called if the length of a `new T[length]` overflows.
void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// While it is true, std::shared_ptr counts without atomic instructions. A
// process with TensorFlow has many threads.
char __libc_single_threaded = false;

#endif  // __linux__
