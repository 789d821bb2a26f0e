#include "tpu_v2_v4/engine/batch.h"

#include <algorithm>
#include <utility>

#include "core/text.h"

namespace tpu_embedding {
namespace {

// Marks an entry that belongs to no sample.
constexpr int64_t kCut = -1;

// Where the entries of an input go.
struct Target {
  const EngineOutput* output;
  std::string input;  // for messages
  // Input row r goes to sample r, or (with positions) its entry p to sample r *
  // positions + p. If outputs belong to tables, each sample of the batch has
  // `stride` samples, of which `width`, from `first` on, belong to this input.
  int64_t rows = 0;
  int64_t positions = 0;
  int64_t first = 0;
  int64_t width = 1;
  int64_t stride = 1;

  int64_t Sample(int64_t row, int64_t position) const {
    if (positions > 0 && position >= positions) return kCut;
    const int64_t place = positions > 0 ? row * positions + position : row;
    return place / width * stride + first + place % width;
  }
};

std::string Columns(int64_t number) { return Concat("[ids, ", number, "]"); }

// Finds the sample that each id belongs to, or kCut.
class SampleFinder {
 public:
  SampleFinder(const EnqueueInput& input, Target target)
      : input_(input), target_(std::move(target)) {}

  Error Find(std::vector<int64_t>* samples) {
    samples->assign(input_.num_ids, kCut);
    if (input_.structure_rank == 2) return FromIndices(samples);
    if (input_.structure.empty()) return OneEach(samples);
    return FromSplits(samples);
  }

 private:
  int64_t num_samples() const { return target_.output->num_samples(); }

  Error OneEach(std::vector<int64_t>* samples) const {
    const int64_t expected = target_.rows ? target_.rows : num_samples();
    if (input_.num_ids != expected || target_.positions) {
      return Concat(target_.input, " has no structure and ", input_.num_ids,
                    " ids. It needs one id for each of ", expected,
                    " samples.");
    }
    for (int64_t i = 0; i < input_.num_ids; ++i) {
      (*samples)[i] = target_.Sample(i, 0);
    }
    return std::nullopt;
  }

  Error FromSplits(std::vector<int64_t>* samples) {
    const std::vector<int64_t>& splits = input_.structure;
    const int64_t rows = splits.size() - 1;
    if (Error error = CheckSplits()) return error;
    if (Error error = SetRows(rows)) return error;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = splits[row]; i < splits[row + 1]; ++i) {
        (*samples)[i] = target_.Sample(row, i - splits[row]);
      }
    }
    return std::nullopt;
  }

  Error CheckSplits() const {
    const std::vector<int64_t>& splits = input_.structure;
    if (splits[0] != 0 || splits.back() != input_.num_ids ||
        !std::is_sorted(splits.begin(), splits.end())) {
      return Concat(target_.input, ": row splits must start at 0, must not ",
                    "decrease and must end at the number of ids, ",
                    input_.num_ids, ".");
    }
    return std::nullopt;
  }

  // Checks that `rows` rows fill the output: each is a sample, or all are
  // sequences of one length.
  Error SetRows(int64_t rows) {
    if (target_.rows) {
      if (rows == target_.rows) return std::nullopt;
      return Concat(target_.input, " has ", rows, " rows and needs ",
                    target_.rows, ".");
    }
    const int64_t length =
        rows > 0 && num_samples() % rows == 0 ? num_samples() / rows : 0;
    const int64_t asked = input_.max_sequence_length;
    if (length == 0 || (asked > 0 && asked != length)) {
      return Concat(target_.input, ": ", rows, " rows",
                    asked > 0 ? Concat(" of `max_sequence_lengths` ", asked)
                              : std::string(),
                    " do not fill the ", num_samples(),
                    " samples of its `input_shape`.");
    }
    target_.positions = length > 1 || asked > 0 ? length : 0;
    return std::nullopt;
  }

  Error FromIndices(std::vector<int64_t>* samples) const {
    const std::vector<int64_t>& shape = target_.output->shape;
    const int64_t rank = shape.size();
    if (input_.structure.empty() && input_.num_ids > 0) return OneEach(samples);
    if (input_.columns != rank + 1 ||
        static_cast<int64_t>(input_.structure.size()) !=
            input_.num_ids * input_.columns) {
      return Concat(target_.input, ": sample indices of ",
                    input_.structure.size(), " numbers in ", input_.columns,
                    " columns for ", input_.num_ids, " ids. Its `input_shape` ",
                    "of rank ", rank, " needs ", Columns(rank + 1), ".");
    }
    for (int64_t i = 0; i < input_.num_ids; ++i) {
      const int64_t* index = &input_.structure[i * input_.columns];
      int64_t sample = 0;
      for (int64_t axis = 0; axis < rank && sample != kCut; ++axis) {
        const bool past = index[axis] >= shape[axis];
        if (index[axis] < 0 || (past && axis == 0)) {
          return Concat(target_.input, ": id ", i, " has the index ",
                        index[axis], " on axis ", axis, " of ", shape[axis],
                        ".");
        }
        // Positions after the end of a sequence belong to no sample.
        sample = past ? kCut : sample * shape[axis] + index[axis];
      }
      (*samples)[i] = sample;
    }
    return std::nullopt;
  }

  const EnqueueInput& input_;
  Target target_;
};

// The entries of one output, from all inputs that fill it.
struct Entries {
  std::vector<int64_t> samples;
  std::vector<int64_t> ids;
  std::vector<float> weights;

  void Sort(int64_t num_samples, std::vector<int64_t>* splits) {
    splits->assign(num_samples + 1, 0);
    for (const int64_t sample : samples) ++(*splits)[sample + 1];
    for (int64_t s = 0; s < num_samples; ++s) (*splits)[s + 1] += (*splits)[s];
    std::vector<int64_t> next = *splits;
    std::vector<int64_t> sorted_ids(ids.size());
    std::vector<float> sorted_weights(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      const int64_t place = next[samples[i]]++;
      sorted_ids[place] = ids[i];
      sorted_weights[place] = weights[i];
    }
    ids = std::move(sorted_ids);
    weights = std::move(sorted_weights);
  }
};

class BatchBuilder {
 public:
  BatchBuilder(const EngineConfig& config, const EnqueueInputs& enqueued)
      : config_(config),
        enqueued_(enqueued),
        entries_(config.outputs.size()),
        used_(config.outputs.size(), 0) {}

  Error Build(CoreBatch* batch) {
    if (Error error = CheckCombiners()) return error;
    if (Error error = config_.batch_size ? AddToTables() : AddToFeatures()) {
      return error;
    }
    batch->prepared.features.resize(config_.outputs.size());
    for (size_t o = 0; o < config_.outputs.size(); ++o) {
      if (Error error = WriteCsr(o, &batch->prepared.features[o])) return error;
    }
    return std::nullopt;
  }

 private:
  Error CheckCombiners() const {
    const size_t number = enqueued_.combiners.size();
    if (number == 0 || number == config_.tables.size()) return std::nullopt;
    return Concat("There are ", number, " `combiners`, but ",
                  config_.tables.size(), " tables. Give one for each table.");
  }

  // Adds input i to output i, if outputs are features.
  Error AddToFeatures() {
    if (enqueued_.inputs.size() != config_.outputs.size()) {
      return Concat("The op has ", enqueued_.inputs.size(),
                    " inputs, but the configuration has ",
                    config_.outputs.size(), " features.");
    }
    for (size_t i = 0; i < enqueued_.inputs.size(); ++i) {
      const EnqueueInput& input = enqueued_.inputs[i];
      const EngineOutput& output = config_.outputs[i];
      if (input.table >= 0 && input.table != output.table) {
        return Concat("Feature ", output.name, " belongs to table ",
                      output.table, ", but its entry of `table_ids` is ",
                      input.table, ".");
      }
      if (input.num_features != 1) {
        return Concat("Feature ", output.name, ": `num_features` is ",
                      input.num_features, ". Where the configuration has ",
                      "features it must be 1.");
      }
      Target target{&output, Concat("Feature ", output.name)};
      if (Error error = Add(input, target, i)) return error;
    }
    return std::nullopt;
  }

  // Adds each input at the next free places of its table's output, if outputs
  // belong to tables.
  Error AddToTables() {
    for (size_t i = 0; i < enqueued_.inputs.size(); ++i) {
      const EnqueueInput& input = enqueued_.inputs[i];
      const std::string name = Concat("Input ", i);
      if (input.table < 0 ||
          input.table >= static_cast<int>(config_.tables.size())) {
        return Concat(name,
                      " refers to no table of the configuration: it has no ",
                      "`feature_descriptor`, so the op must have ",
                      "`table_ids` in [0, ", config_.tables.size(), ").");
      }
      if (Error error = AddToTable(input, name)) return error;
    }
    for (size_t o = 0; o < used_.size(); ++o) {
      const int64_t places =
          config_.outputs[o].num_samples() / config_.batch_size;
      if (used_[o] == places) continue;
      return Concat("Table ", config_.outputs[o].name, ": `num_features` is ",
                    places, " in the configuration, but the inputs fill ",
                    used_[o], ".");
    }
    return std::nullopt;
  }

  Error AddToTable(const EnqueueInput& input, const std::string& name) {
    const EngineOutput& output = config_.outputs[input.table];
    const int64_t length = input.max_sequence_length;
    if (length < 0 || input.num_features < 1 ||
        (length > 0 && input.num_features > 1)) {
      return Concat(name, ": `max_sequence_lengths` ", length,
                    " and `num_features` ", input.num_features,
                    " must be >= 0 and >= 1, and a sequence has one feature.");
    }
    Target target{&output, name};
    target.stride = output.num_samples() / config_.batch_size;
    target.positions = length;
    target.width = length > 0 ? length : input.num_features;
    target.rows = config_.batch_size * input.num_features;
    target.first = used_[input.table];
    used_[input.table] += target.width;
    if (used_[input.table] > target.stride) {
      return Concat(name, ": table ", output.name, " takes only ",
                    target.stride, " features, as its `num_features` says.");
    }
    return Add(input, target, input.table);
  }

  Error Add(const EnqueueInput& input, const Target& target, int output) {
    if (!input.weights.empty() &&
        static_cast<int64_t>(input.weights.size()) != input.num_ids) {
      return Concat(target.input, " has ", input.num_ids, " ids and ",
                    input.weights.size(), " weights.");
    }
    std::vector<int64_t> samples;
    if (Error error = SampleFinder(input, target).Find(&samples)) return error;
    const EngineTable& table = config_.tables[config_.outputs[output].table];
    Entries& entries = entries_[output];
    for (int64_t i = 0; i < input.num_ids; ++i) {
      const int64_t id = input.id(i);
      // This comes before entries are cut: a bad id is always an error.
      if (id < 0 || id >= table.num_rows) {
        return BadId(output, samples[i], id);
      }
      if (samples[i] == kCut) continue;
      entries.samples.push_back(samples[i]);
      entries.ids.push_back(id);
      entries.weights.push_back(input.weights.empty() ? 1.0f
                                                      : input.weights[i]);
    }
    return std::nullopt;
  }

  Error BadId(int output, int64_t sample, int64_t id) const {
    const EngineTable& table = config_.tables[config_.outputs[output].table];
    return Concat(
        "Feature ", config_.outputs[output].name, ", table ", table.name, ": ",
        sample == kCut ? std::string("an entry past its sequence")
                       : Concat("sample ", sample),
        " has id ", id, ", but ids must be in [0, ", table.num_rows, ").");
  }

  FeatureSpec Spec(int output) const {
    const int table = config_.outputs[output].table;
    FeatureSpec spec;
    spec.path = config_.outputs[output].name;
    spec.table = config_.tables[table].name;
    spec.vocabulary_size = config_.tables[table].num_rows;
    spec.kind = InputKind::kRagged;
    spec.combiner = enqueued_.combiners.empty() ? Combiner::kSum
                                                : enqueued_.combiners[table];
    return spec;
  }

  Error WriteCsr(int output, FeatureCsr* csr) {
    Entries& entries = entries_[output];
    std::vector<int64_t> splits;
    entries.Sort(config_.outputs[output].num_samples(), &splits);
    FeatureInput input;
    input.ids64 = entries.ids.data();
    input.num_ids = entries.ids.size();
    input.weights = entries.weights.data();
    input.structure = splits.data();
    input.structure_size = splits.size();
    return BuildCsr(Spec(output), input, csr);
  }

  const EngineConfig& config_;
  const EnqueueInputs& enqueued_;
  std::vector<Entries> entries_;  // by output
  std::vector<int64_t> used_;     // by output: places that inputs have taken
};

}  // namespace

Error BuildBatch(const EngineConfig& config, const EnqueueInputs& enqueued,
                 const ParallelFor& parallel_for, CoreBatch* batch) {
  if (Error error = BatchBuilder(config, enqueued).Build(batch)) return error;
  batch->training = enqueued.training;
  if (batch->training) {
    TableMap tables;
    for (const EngineOutput& output : config.outputs) {
      tables.feature_tables.push_back(output.table);
    }
    for (const EngineTable& table : config.tables) {
      tables.vocabulary_sizes.push_back(table.num_rows);
    }
    GroupRows(tables, parallel_for, &batch->prepared);
  }
  return std::nullopt;
}

}  // namespace tpu_embedding
