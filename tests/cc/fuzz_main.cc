// A small mutation fuzzer: bytes are changed at random, under a seed, for as
// long as it is asked to, and inputs that were useful are changed again.
//
//   fuzz [--seconds 5] [--seed 1]
//
// With TPU_EMBEDDING_LIBFUZZER it is libFuzzer's entry instead, without a main.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <random>
#include <vector>

#include "fuzz.h"

namespace tpu_embedding::fuzz {
namespace {

struct Target {
  const char* name;
  bool (*try_one)(const uint8_t* data, size_t size);
};

constexpr Target kTargets[] = {
    {"features", &FuzzFeatures},
    {"csr", &FuzzCsr},
};

}  // namespace
}  // namespace tpu_embedding::fuzz

#ifdef TPU_EMBEDDING_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tpu_embedding::fuzz::kTargets;
  if (size == 0) return 0;
  const size_t target = data[0] % std::size(kTargets);
  kTargets[target].try_one(data + 1, size - 1);
  return 0;
}

#else

namespace tpu_embedding::fuzz {
namespace {

using Input = std::vector<uint8_t>;

Input Mutate(Input input, std::mt19937_64& random) {
  const auto below = [&](size_t end) { return random() % end; };
  if (input.empty() || below(8) == 0) {
    input.resize(1 + below(200));
    for (uint8_t& byte : input) byte = random();
  }
  for (size_t changes = 1 + below(4); changes > 0; --changes) {
    const size_t at = below(input.size());
    switch (below(5)) {
      case 0:
        input[at] ^= 1 << below(8);
        break;
      case 1:
        input[at] = random();
        break;
      case 2:
        input[at] = 224 + below(32);  // a number from the edges
        break;
      case 3:
        input.insert(input.begin() + at, uint8_t(random()));
        break;
      default:
        if (input.size() > 1) input.erase(input.begin() + at);
    }
  }
  return input;
}

// Tries one target until `end`. Returns whether inputs of both sorts came up.
bool RunTarget(const Target& target, std::chrono::steady_clock::time_point end,
               std::mt19937_64& random) {
  std::vector<Input> corpus{{}};
  uint64_t tried = 0;
  uint64_t accepted = 0;
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 64; ++i, ++tried) {
      Input input = Mutate(corpus[random() % corpus.size()], random);
      if (!target.try_one(input.data(), input.size())) continue;
      // What is accepted goes deep; a part of it is where to go on from.
      ++accepted;
      if (corpus.size() < 256) {
        corpus.push_back(std::move(input));
      } else if (random() % 16 == 0) {
        corpus[random() % corpus.size()] = std::move(input);
      }
    }
  }
  std::cout << target.name << ": " << tried << " inputs, " << accepted
            << " accepted" << std::endl;
  return accepted > 0 && accepted < tried;
}

int Run(int argc, char** argv) {
  double seconds = 1.0;
  uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!std::strcmp(argv[i], "--seconds")) seconds = std::atof(argv[i + 1]);
    if (!std::strcmp(argv[i], "--seed")) seed = std::atoll(argv[i + 1]);
  }
  std::mt19937_64 random(seed);
  bool both_sorts = true;
  for (const Target& target : kTargets) {
    const auto share = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(seconds / std::size(kTargets)));
    both_sorts &=
        RunTarget(target, std::chrono::steady_clock::now() + share, random);
  }
  return both_sorts ? 0 : 1;
}

}  // namespace
}  // namespace tpu_embedding::fuzz

int main(int argc, char** argv) { return tpu_embedding::fuzz::Run(argc, argv); }

#endif  // TPU_EMBEDDING_LIBFUZZER
