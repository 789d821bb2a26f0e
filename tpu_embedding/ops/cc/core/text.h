// Makes texts of errors.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_TEXT_H_
#define TPU_EMBEDDING_OPS_CC_CORE_TEXT_H_

#include <sstream>
#include <string>

namespace tpu_embedding {

template <class... Parts>
std::string Concat(const Parts&... parts) {
  // Some systems of TensorFlow users lack the constructor without arguments.
  std::ostringstream text(std::ios_base::out);
  (text << ... << parts);
  return text.str();
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_TEXT_H_
