// The configuration of an embedding engine, as plain values.
//
// The engine is that of TPU v2, v3 and v4. This folder is plain C++17 and knows
// neither TensorFlow nor protocol buffers, so that tests build it alone.

#ifndef TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_CONFIG_H_
#define TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_CONFIG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/lookup.h"
#include "core/update.h"

namespace tpu_embedding {

// How the rows of a table are divided over n hosts. In both ways each host gets
// V / n rows, and the first V % n hosts one more.
enum class HostSharding {
  kDiv,  // each host has consecutive rows
  kMod,  // row r goes to host r % n
};

struct EngineTable {
  std::string name;
  int64_t num_rows = 0;
  int64_t dim = 0;
  std::string optimizer;           // as the configuration names it
  std::vector<std::string> slots;  // by the names of the load op's inputs
  // Null if this engine has no rule for the optimizer: it then keeps the slots
  // and does not train.
  UpdateFn update = nullptr;
  std::vector<float> hyperparameters;
  std::shared_ptr<RowOptions> options;  // not null beside an `update`
  float rate = 0.0f;
  int rate_tag = -1;  // >= 0: the rate comes with the gradients
  // If set, the gradients of all cores are summed before the rule runs once;
  // otherwise the rule runs core by core.
  bool accumulates = true;
  Quantization quantization;
};

// One tensor of activations of a core: of a feature, or of a table in
// configurations without features.
struct EngineOutput {
  std::string name;
  int table = 0;
  std::vector<int64_t> shape;  // without the embedding axis

  int64_t num_samples() const {
    int64_t product = 1;
    for (const int64_t axis : shape) product *= axis;
    return product;
  }
};

struct EngineConfig {
  std::vector<EngineTable> tables;
  std::vector<EngineOutput> outputs;
  // The samples per core if outputs belong to tables: each sample fills as many
  // rows of an output as its table has features. Otherwise 0.
  int64_t batch_size = 0;
  int num_hosts = 1;
  int num_cores = 1;
  int cores_per_replica = 1;
  HostSharding sharding = HostSharding::kDiv;
  bool pipelined = false;
  bool training = true;  // for batches that do not specify it
  int num_rates = 0;

  int num_replicas() const { return num_cores / cores_per_replica; }
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_CONFIG_H_
