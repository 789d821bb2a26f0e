// The options of every rule: clipping, weight decay, and rows without entries.
// Few files include this, so that a change of the options does not make all
// others compile again.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ROW_OPTIONS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ROW_OPTIONS_H_

#include <limits>

namespace tpu_embedding {

// An infinite limit or a zero factor is "off".
struct RowOptions {
  float clip_gradient_norm = std::numeric_limits<float>::infinity();
  float clip_gradient_min = -std::numeric_limits<float>::infinity();
  float clip_gradient_max = std::numeric_limits<float>::infinity();
  float clip_weight_min = -std::numeric_limits<float>::infinity();
  float clip_weight_max = std::numeric_limits<float>::infinity();
  float weight_decay_factor = 0.0f;
  bool multiply_decay_by_rate = false;
  // Rows that no entry names are updated too, with a gradient of zeros.
  bool all_rows = false;

  bool clips_gradient_norm() const {
    return clip_gradient_norm < std::numeric_limits<float>::infinity();
  }
  bool clips_gradient() const {
    return clip_gradient_min > -std::numeric_limits<float>::infinity() ||
           clip_gradient_max < std::numeric_limits<float>::infinity();
  }
  bool clips_weight() const {
    return clip_weight_min > -std::numeric_limits<float>::infinity() ||
           clip_weight_max < std::numeric_limits<float>::infinity();
  }
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ROW_OPTIONS_H_
