// The whole test framework of the C++ core: a check that says what it saw.

#ifndef TPU_EMBEDDING_TESTS_CC_CHECK_H_
#define TPU_EMBEDDING_TESTS_CC_CHECK_H_

#include <cstdlib>
#include <iostream>

namespace tpu_embedding::testing {

// Ends the test with the two values that `comparison` does not hold for.
template <typename A, typename B>
[[noreturn]] void Fail(const char* file, int line, const char* comparison,
                       const A& a, const B& b) {
  std::cerr << file << ":" << line << ": not true: " << comparison << "\n"
            << "  left:  " << a << "\n  right: " << b << std::endl;
  std::exit(1);
}

}  // namespace tpu_embedding::testing

// Each operand is evaluated once and copied, so that it may be a part of a
// temporary. The operands must be printable.
#define TPU_EMBEDDING_CHECK(a, op, b)                                       \
  do {                                                                      \
    const auto check_a = (a);                                               \
    const auto check_b = (b);                                               \
    if (!(check_a op check_b)) {                                            \
      ::tpu_embedding::testing::Fail(__FILE__, __LINE__, #a " " #op " " #b, \
                                     check_a, check_b);                     \
    }                                                                       \
  } while (false)

#define CHECK_EQ(a, b) TPU_EMBEDDING_CHECK(a, ==, b)
#define CHECK_NE(a, b) TPU_EMBEDDING_CHECK(a, !=, b)
#define CHECK_LT(a, b) TPU_EMBEDDING_CHECK(a, <, b)
#define CHECK_LE(a, b) TPU_EMBEDDING_CHECK(a, <=, b)
#define CHECK_GT(a, b) TPU_EMBEDDING_CHECK(a, >, b)
#define CHECK_GE(a, b) TPU_EMBEDDING_CHECK(a, >=, b)
#define CHECK_TRUE(condition) CHECK_EQ(static_cast<bool>(condition), true)

#endif  // TPU_EMBEDDING_TESTS_CC_CHECK_H_
