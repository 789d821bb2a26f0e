// What workers throw reaches their caller.

#include "core/worker_failure.h"

#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

// What the caller of workers sees, of which one runs `body`.
template <class Body>
std::string Seen(const Body& body) {
  WorkerFailure failure;
  std::vector<std::thread> workers;
  workers.emplace_back([&] { failure.Guard([] {}); });
  workers.emplace_back([&] { failure.Guard(body); });
  for (std::thread& worker : workers) worker.join();
  try {
    failure.Rethrow();
  } catch (const std::bad_alloc&) {
    return "no memory";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

void TestEachKind() {
  CHECK_EQ(Seen([] {}), "nothing");
  CHECK_EQ(Seen([] { throw std::bad_alloc(); }), "no memory");
  // The largest length that the elements of an array could have is less.
  volatile size_t length = ~size_t{0};
  CHECK_EQ(Seen([&] { delete[] new double[length]; }), "no memory");
  CHECK_EQ(Seen([] { throw std::length_error("too long"); }), "too long");
  CHECK_EQ(Seen([] { throw 1; }),
           "A worker threw something other than a std::exception.");
}

}  // namespace
}  // namespace tpu_embedding

int main() { tpu_embedding::TestEachKind(); }
