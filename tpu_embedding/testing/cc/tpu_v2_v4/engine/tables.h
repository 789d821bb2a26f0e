// The tables and slots that an engine holds.

#ifndef TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_TABLES_H_
#define TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_TABLES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/feature.h"
#include "core/parallel.h"
#include "tpu_v2_v4/engine/batch.h"
#include "tpu_v2_v4/engine/config.h"

namespace tpu_embedding {

// Tells which rows of a table are on which host.
class HostRows {
 public:
  HostRows(const EngineConfig& config, int table)
      : sharding_(config.sharding),
        num_hosts_(config.num_hosts),
        num_rows_(config.tables[table].num_rows) {}

  int64_t Count(int host) const {
    return num_rows_ / num_hosts_ + (host < num_rows_ % num_hosts_ ? 1 : 0);
  }

  // Returns the row of the table that is row `local` of the host.
  int64_t Row(int host, int64_t local) const {
    if (sharding_ == HostSharding::kMod) return local * num_hosts_ + host;
    const int64_t longer = num_rows_ % num_hosts_;
    return num_rows_ / num_hosts_ * host + (host < longer ? host : longer) +
           local;
  }

 private:
  const HostSharding sharding_;
  const int64_t num_hosts_;
  const int64_t num_rows_;
};

// The batches of all cores, in core order.
using StepBatches = std::vector<std::shared_ptr<const CoreBatch>>;

// The gradients of one step.
struct StepGradients {
  // The gradients by core and output, [num_samples, dim].
  std::vector<std::vector<const float*>> values;
  std::vector<float> rates;          // by tag
  std::shared_ptr<const void> keep;  // what `values` point into
};

class EngineTables {
 public:
  explicit EngineTables(const EngineConfig* config);

  // Copy the parameters, then the slots in the order of the configuration, from
  // `values` or to them; each is [HostRows::Count(host), dim].
  void Load(int table, int host, const std::vector<const float*>& values);
  void Retrieve(int table, int host, const std::vector<float*>& values) const;

  // Fail if a part is missing, and say which.
  Error CheckLoaded() const;
  Error CheckLoaded(int table, int host) const;

  // Writes the activations of one core, output by output.
  void LookUp(const CoreBatch& batch, const std::vector<float*>& outputs,
              const ParallelFor& parallel_for) const;

  void Update(const StepBatches& batches, const StepGradients& gradients,
              const ParallelFor& parallel_for);

 private:
  struct Storage {
    std::vector<std::vector<float>> values;  // parameters, then slots
    std::vector<bool> loaded;                // by host
  };

  void UpdateTable(int table, const StepBatches& batches,
                   const StepGradients& gradients,
                   const ParallelFor& parallel_for);
  // Runs the rule of `table` once.
  void Apply(int table, float rate, const RowGroups& groups,
             const std::vector<const float*>& samples,
             const ParallelFor& parallel_for);

  const EngineConfig& config_;
  std::vector<Storage> storage_;  // by table
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_TABLES_H_
