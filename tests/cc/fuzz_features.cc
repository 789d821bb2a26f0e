// Features of any sort -> CSR -> stack and back -> row groups: what is accepted
// is consistent, and nothing reads or writes outside of its arrays.

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "core/feature.h"
#include "core/prepared_batch.h"
#include "core/row_groups.h"
#include "core/stacks.h"
#include "fuzz.h"

namespace tpu_embedding::fuzz {
namespace {

// Arrays of exactly the size that the view says, each an allocation of its own:
// a sanitizer sees one element too far.
struct Storage {
  std::unique_ptr<int32_t[]> ids32;
  std::unique_ptr<int64_t[]> ids64;
  std::unique_ptr<float[]> weights;
  std::unique_ptr<int64_t[]> structure;
  std::unique_ptr<int64_t[]> weight_structure;
  FeatureSpec spec;
  FeatureInput input;
};

void ReadSpec(Bytes& bytes, FeatureSpec* spec) {
  spec->path = "f";
  spec->table = "t";
  spec->kind = static_cast<InputKind>(bytes.Number(0, 2));
  spec->combiner = static_cast<Combiner>(bytes.Number(0, 2));
  spec->invalid_ids = static_cast<InvalidIds>(bytes.Number(0, 2));
  spec->check_numerics = bytes.Number(0, 1);
  spec->sequence_length = bytes.Number(0, 3) ? 0 : bytes.Number(1, 4);
  spec->shape_known = bytes.Number(0, 3) == 0;
  if (spec->shape_known) {
    for (int64_t axes = bytes.Number(0, 3); axes > 0; --axes) {
      spec->declared_shape.push_back(bytes.Number(-1, 6));
    }
    spec->declared_source = "a test";
  }
}

std::unique_ptr<int64_t[]> Copy(const std::vector<int64_t>& values) {
  auto copy = std::make_unique<int64_t[]>(values.size());
  std::copy(values.begin(), values.end(), copy.get());
  return copy;
}

// Mostly a structure that fits, with some numbers that do not.
std::vector<int64_t> Structure(Bytes& bytes, const FeatureSpec& spec,
                               int64_t num_ids, FeatureInput* input) {
  std::vector<int64_t> structure;
  const bool wild = bytes.Number(0, 3) == 0;
  if (spec.kind == InputKind::kRagged) {
    const int64_t rows = bytes.Number(0, 6);
    int64_t next = 0;
    for (int64_t row = 0; row <= rows; ++row) {
      structure.push_back(wild ? bytes.AnyNumber(num_ids) : next);
      next = row + 1 == rows ? num_ids
                             : std::min(next + bytes.Number(0, 4), num_ids);
    }
    input->shape = {rows};
  } else if (spec.kind == InputKind::kSparse) {
    const int64_t rank = bytes.Number(2, 4);
    int64_t cells = 1;
    for (int64_t axis = 0; axis < rank; ++axis) {
      const int64_t size = bytes.Number(1, 6);
      input->shape.push_back(wild ? bytes.AnyNumber(size) : size);
      cells *= size;
    }
    int64_t cell = -1;
    for (int64_t entry = 0; entry < num_ids; ++entry) {
      cell += 1 + bytes.Number(0, 2);
      int64_t rest = cell;
      std::vector<int64_t> index(rank);
      for (int64_t axis = rank - 1; axis >= 0; --axis) {
        const int64_t size = std::max<int64_t>(input->shape[axis], 1);
        index[axis] = wild ? bytes.AnyNumber(size) : rest % size;
        rest /= size;
      }
      structure.insert(structure.end(), index.begin(), index.end());
    }
  }
  return structure;
}

void ReadFeature(Bytes& bytes, int64_t vocabulary_size, Storage* storage) {
  FeatureSpec& spec = storage->spec;
  FeatureInput& input = storage->input;
  ReadSpec(bytes, &spec);
  spec.vocabulary_size = vocabulary_size;
  input.num_ids = bytes.Number(0, 12);
  if (spec.kind == InputKind::kDense) {
    // The op checks that a dense shape is that of the ids.
    input.shape = {bytes.Number(0, 4)};
    if (bytes.Number(0, 1)) input.shape.push_back(bytes.Number(0, 4));
    input.num_ids = 1;
    for (const int64_t axis : input.shape) input.num_ids *= axis;
  }
  const auto structure = Structure(bytes, spec, input.num_ids, &input);
  storage->structure = Copy(structure);
  input.structure = storage->structure.get();
  input.structure_size = structure.size();
  if (bytes.Number(0, 1)) {
    storage->ids32 = std::make_unique<int32_t[]>(input.num_ids);
    for (int64_t i = 0; i < input.num_ids; ++i) {
      storage->ids32[i] =
          static_cast<int32_t>(bytes.AnyNumber(vocabulary_size));
    }
    input.ids32 = storage->ids32.get();
  } else {
    storage->ids64 = std::make_unique<int64_t[]>(input.num_ids);
    for (int64_t i = 0; i < input.num_ids; ++i) {
      storage->ids64[i] = bytes.AnyNumber(vocabulary_size);
    }
    input.ids64 = storage->ids64.get();
  }
  if (bytes.Number(0, 1)) {
    storage->weights = std::make_unique<float[]>(input.num_ids);
    for (int64_t i = 0; i < input.num_ids; ++i) {
      storage->weights[i] = static_cast<float>(bytes.AnyNumber(4));
    }
    input.weights = storage->weights.get();
    if (bytes.Number(0, 3) == 0) {
      auto other = structure;
      if (!other.empty() && bytes.Number(0, 1)) other.pop_back();
      storage->weight_structure = Copy(other);
      input.weight_structure = storage->weight_structure.get();
      input.weight_structure_size = other.size();
    }
  }
}

void CheckCsr(const FeatureCsr& csr, const FeatureSpec& spec) {
  int64_t product = 1;
  for (const int64_t axis : csr.output_shape) product *= axis;
  Require(product == csr.num_samples(), "the shape has all samples");
  Require(csr.offsets[0] == 0, "offsets start at 0");
  for (int64_t s = 0; s < csr.num_samples(); ++s) {
    Require(csr.offsets[s] <= csr.offsets[s + 1], "offsets rise");
  }
  const int64_t entries = spec.grows ? csr.ids.size() : csr.rows.size();
  Require(csr.num_entries() == entries, "offsets end");
  Require(csr.gains.size() == 0 || csr.gains.size() == entries,
          "a gain for each entry");
  Require(csr.sample_gains.size() == 0 ||
              csr.sample_gains.size() == csr.num_samples(),
          "a gain for each sample");
  Require(csr.gains.size() == 0 || csr.sample_gains.size() == 0,
          "gains of one kind");
  for (int64_t i = 0; i < csr.rows.size(); ++i) {
    Require(csr.rows[i] >= 0 && csr.rows[i] < spec.vocabulary_size,
            "rows are of the table");
  }
}

// The groups have all entries of these features.
void CheckGroups(const RowGroups& groups,
                 const std::vector<const FeatureCsr*>& features) {
  int64_t num_entries = 0;
  int64_t num_samples = 0;
  for (const FeatureCsr* feature : features) {
    num_entries += feature->rows.size();
    num_samples += feature->num_samples();
  }
  Require(groups.samples.size() == num_entries, "groups keep all entries");
  Require(groups.gains.size() == 0 || groups.gains.size() == num_entries,
          "a gain for each entry of a group, or none");
  Require(groups.sample_gains.size() == 0 ||
              groups.sample_gains.size() == num_samples,
          "a gain for each sample, or none");
  Require(groups.starts[groups.num_rows()] == num_entries, "groups end");
  for (int64_t g = 0; g < groups.num_rows(); ++g) {
    Require(g == 0 || groups.rows[g - 1] < groups.rows[g], "rows ascend");
    Require(groups.starts[g] < groups.starts[g + 1], "no group is empty");
    for (int64_t i = groups.starts[g]; i < groups.starts[g + 1]; ++i) {
      Require(groups.samples[i] < num_samples, "samples are numbered");
      Require(
          i == groups.starts[g] || groups.samples[i - 1] <= groups.samples[i],
          "a group keeps the order of samples");
    }
  }
}

// Groups two replicas that have the same batch.
void CheckTwice(std::vector<const FeatureCsr*> features,
                int64_t vocabulary_size, const ParallelFor& parallel_for) {
  const std::vector<const FeatureCsr*> once = features;
  features.insert(features.end(), once.begin(), once.end());
  RowGroups merged;
  std::vector<FeatureEntries> entries;
  for (const FeatureCsr* feature : features) entries.push_back(*feature);
  GroupByRow({{entries, vocabulary_size, &merged}}, parallel_for);
  CheckGroups(merged, features);
}

template <class T>
bool Same(const Buffer<T>& a, const Buffer<T>& b) {
  return std::equal(a.data(), a.data() + a.size(), b.data(),
                    b.data() + b.size());
}

// Writes a stack, changes some of it, and reads it back.
void RoundTrip(Bytes& bytes, const std::vector<StackedFeature>& stacked,
               const std::vector<const FeatureCsr*>& batches, bool grows) {
  int64_t samples = 0;
  int64_t entries = 0;
  for (const FeatureCsr* csr : batches) {
    samples += csr->num_samples();
    entries += csr->num_entries();
  }
  std::vector<int32_t> pointers(samples + 1), sample_ids(entries);
  std::vector<int32_t> tokens(grows ? 0 : entries);
  std::vector<int64_t> ids(grows ? entries : 0);
  std::vector<float> gains(entries);
  WriteStack(stacked, batches,
             {pointers.data(), sample_ids.data(), tokens.data(),
              grows ? ids.data() : nullptr, gains.data()});
  const bool change = bytes.Number(0, 1);
  if (change) {
    pointers[bytes.Byte() % pointers.size()] =
        static_cast<int32_t>(bytes.AnyNumber(entries));
    if (!tokens.empty()) {
      tokens[bytes.Byte() % entries] =
          static_cast<int32_t>(bytes.AnyNumber(40));
    }
    if (bytes.Number(0, 3) == 0) pointers.pop_back();
  }
  std::vector<FeatureCsr> read(batches.size());
  std::vector<FeatureCsr*> out;
  for (size_t f = 0; f < read.size(); ++f) {
    read[f].output_shape = batches[f]->output_shape;
    if (change && bytes.Number(0, 7) == 0) {
      read[f].output_shape.push_back(bytes.AnyNumber(2));
    }
    out.push_back(&read[f]);
  }
  StackInput input{"stack",
                   pointers.data(),
                   int64_t(pointers.size()),
                   tokens.data(),
                   grows ? ids.data() : nullptr,
                   int64_t(entries),
                   gains.data(),
                   int64_t(gains.size())};
  const Error error = ReadStack(stacked, input, out);
  Require(change || !error, "what was written can be read");
  if (change || error) return;
  for (size_t f = 0; f < read.size(); ++f) {
    const FeatureCsr& before = *batches[f];
    Require(Same(read[f].offsets, before.offsets),
            "the same offsets come back");
    Require(Same(read[f].rows, before.rows), "the same rows come back");
    Require(Same(read[f].ids, before.ids), "the same ids come back");
    for (int64_t s = 0; s < before.num_samples(); ++s) {
      for (int64_t i = before.offsets[s]; i < before.offsets[s + 1]; ++i) {
        Require(read[f].gain(s, i) == before.gain(s, i), "the same gains");
      }
    }
  }
}

// As many threads as there are units: for the thread sanitizer.
void OnThreads(int64_t total, int64_t, const Range& body) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < total; ++i) {
    threads.emplace_back([&body, i] { body(i, i + 1); });
  }
  for (std::thread& thread : threads) thread.join();
}

void InLine(int64_t total, int64_t, const Range& body) { body(0, total); }

}  // namespace

bool FuzzFeatures(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  TableMap tables;
  tables.vocabulary_sizes = {bytes.Number(1, 20), bytes.Number(1, 200)};
  const int64_t num_features = bytes.Number(1, 3);
  std::vector<Storage> storage(num_features);
  std::vector<FeatureSpec> specs;
  std::vector<FeatureInput> inputs;
  const bool grows = bytes.Number(0, 3) == 0;
  for (Storage& own : storage) {
    const int table = static_cast<int>(bytes.Number(0, 1));
    ReadFeature(bytes, tables.vocabulary_sizes[table], &own);
    tables.feature_tables.push_back(table);
    own.spec.grows = grows;
    specs.push_back(own.spec);
    inputs.push_back(own.input);
  }
  PreparedBatch batch;
  const ParallelFor parallel_for =
      bytes.Number(0, 15) == 0 ? ParallelFor(OnThreads) : ParallelFor(InLine);
  if (PrepareBatch(specs, tables, inputs, true, parallel_for, &batch)) {
    return false;
  }
  std::vector<StackedFeature> stacked;
  std::vector<const FeatureCsr*> batches;
  std::vector<std::vector<const FeatureCsr*>> by_table(2);
  for (int64_t f = 0; f < num_features; ++f) {
    const int table = tables.feature_tables[f];
    CheckCsr(batch.features[f], specs[f]);
    batches.push_back(&batch.features[f]);
    by_table[table].push_back(&batch.features[f]);
    stacked.push_back({"f", table ? 20 : 0, specs[f].vocabulary_size});
  }
  for (int t = 0; t < 2 && !grows; ++t) {
    CheckGroups(batch.tables[t], by_table[t]);
    CheckTwice(by_table[t], tables.vocabulary_sizes[t], parallel_for);
  }
  RoundTrip(bytes, stacked, batches, grows);
  return true;
}

}  // namespace tpu_embedding::fuzz
