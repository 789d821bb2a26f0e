// The plan of an embedding, and records, the form in which it comes from
// Python.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_PLAN_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_PLAN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/lookup.h"
#include "core/prepared_batch.h"
#include "core/routing.h"
#include "core/rules.h"
#include "core/stacks.h"
#include "core/vocabulary.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/attr_value.pb.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

struct IdleRule;  // See core/idle.h.

// Named fields, serialized by ops/library.py. A field that is missing or of
// another type is an error.
class Record {
 public:
  Record() = default;
  explicit Record(tensorflow::NameAttrList fields)
      : fields_(std::move(fields)) {}

  // Reads the record in the string attribute `name` of an op.
  absl::Status Read(tensorflow::OpKernelConstruction* context,
                    const char* name);
  absl::Status Parse(const std::string& text);

  template <class T>
  absl::Status Get(const char* name, T* value) const {
    const absl::Status found = tensorflow::GetNodeAttr(
        tensorflow::AttrSlice(&fields_.attr()), name, value);
    if (found.ok()) return found;
    return absl::InvalidArgumentError(absl::StrCat(
        "A malformed graph: a record lacks the field `", name,
        "`, or the field has another type. Trace the function again."));
  }
  absl::Status Get(const char* name, std::vector<Record>* records) const;

 private:
  tensorflow::NameAttrList fields_;
};

// Reads a feature, except for what the kind of its input and build() add.
absl::Status ReadFeature(const Record& record, FeatureSpec* spec);

struct TablePlan {
  std::string name;
  int64_t rows = 0;
  int64_t dim = 0;
  RowStorage storage = RowStorage::kFloat32;
  int64_t grids = -1;  // of int8, the place of its second array in `tables`
  Quantization quantization;
  std::vector<int> features;  // that look it up, ascending
  // Null for a table without an optimizer, which is never updated.
  const RuleEntry* rule = nullptr;
  std::vector<float> hyperparameters;
  std::shared_ptr<const RowOptions> options;
  uint64_t rounding_seed = 0;
  // What a step without a gradient does to rows that wait for one, and how many
  // steps the history holds. Null if rows do not wait.
  std::shared_ptr<const IdleRule> idle;
  int64_t history = 0;
  // The vocabulary of a growing table, which may have at most `rows` rows.
  std::optional<VocabularyOptions> vocabulary;
  std::vector<float> first_slots;  // what new rows of its slots start as
};

struct StackPlan {
  std::string name;
  std::vector<int> features;            // in the order of their samples
  std::vector<StackedFeature> stacked;  // in the same order
  bool grows = false;                   // its only table grows
};

// Everything that the ops of one embedding share. Equal texts give the same
// object: ops belong together if they have the same plan.
struct Plan {
  std::vector<FeatureSpec> features;
  std::vector<int> feature_tables;
  TableMap table_map;
  std::vector<TablePlan> tables;
  int64_t num_arrays = 0;         // of all tables
  std::vector<StackPlan> stacks;  // none where no class hands batches out
  bool check_numerics = false;
  int num_replicas = 1;
  int64_t capacity = 1;        // batches of one replica that may wait
  bool pipelined = false;      // leave each update pending for one step
  Placement placement;         // of the tables, where there are several owners
  bool bfloat16_wire = false;  // float32 values travel as bfloat16

  int64_t dim(int feature) const { return tables[feature_tables[feature]].dim; }
  // Returns whether each table grows.
  std::vector<bool> growing() const {
    std::vector<bool> found;
    for (const TablePlan& table : tables) {
      found.push_back(table.vocabulary.has_value());
    }
    return found;
  }
};
using SharedPlan = std::shared_ptr<const Plan>;

// Reads the plan in the string attribute "plan".
absl::Status ReadPlan(tensorflow::OpKernelConstruction* context,
                      SharedPlan* plan);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_PLAN_H_
