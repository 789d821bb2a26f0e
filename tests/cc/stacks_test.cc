// Stacks there and back, and stacks of anything: never out of bounds (the
// sanitizers watch).

#include "core/stacks.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "core/feature.h"

namespace tpu_embedding {
namespace {

std::mt19937_64 generator(20260731);

int64_t Random(int64_t below) {
  return std::uniform_int_distribution<int64_t>(0, below - 1)(generator);
}

FeatureCsr RandomBatch(int64_t samples, int64_t vocabulary_size, bool grows) {
  FeatureCsr batch;
  batch.output_shape = {samples};
  batch.offsets.Resize(samples + 1);
  batch.offsets[0] = 0;
  for (int64_t s = 0; s < samples; ++s) {
    batch.offsets[s + 1] = batch.offsets[s] + Random(4);
  }
  const int64_t entries = batch.offsets[samples];
  batch.rows.Resize(grows ? 0 : entries);
  batch.ids.Resize(grows ? entries : 0);
  for (int64_t i = 0; i < batch.rows.size(); ++i) {
    batch.rows[i] = Random(vocabulary_size);
  }
  for (int64_t i = 0; i < batch.ids.size(); ++i) {
    batch.ids[i] = static_cast<int64_t>(generator());
  }
  const int64_t kind = Random(3);  // gains of entries, of samples, or none
  batch.gains.Resize(kind == 0 ? entries : 0);
  batch.sample_gains.Resize(kind == 1 ? samples : 0);
  for (Buffer<float>* gains : {&batch.gains, &batch.sample_gains}) {
    for (int64_t i = 0; i < gains->size(); ++i) {
      (*gains)[i] = Random(9) / 4.0f;
    }
  }
  return batch;
}

// What an op holds of one stack.
struct Tensors {
  std::vector<int32_t> row_pointers, sample_ids, token_ids;
  std::vector<int64_t> ids;  // of a growing table
  std::vector<float> gains;

  StackInput View() const {
    return {"films",
            row_pointers.data(),
            static_cast<int64_t>(row_pointers.size()),
            ids.empty() ? token_ids.data() : nullptr,
            ids.empty() ? nullptr : ids.data(),
            static_cast<int64_t>(std::max(ids.size(), token_ids.size())),
            gains.data(),
            static_cast<int64_t>(gains.size())};
  }
};

Tensors Write(const std::vector<StackedFeature>& features,
              const std::vector<FeatureCsr>& batches, bool grows) {
  int64_t samples = 0, entries = 0;
  std::vector<const FeatureCsr*> pointers;
  for (const FeatureCsr& batch : batches) {
    samples += batch.num_samples();
    entries += batch.num_entries();
    pointers.push_back(&batch);
  }
  Tensors tensors;
  tensors.row_pointers.resize(samples + 1);
  tensors.sample_ids.resize(entries);
  tensors.ids.resize(grows ? entries : 0);
  tensors.token_ids.resize(grows ? 0 : entries);
  tensors.gains.resize(entries);
  WriteStack(features, pointers,
             {tensors.row_pointers.data(), tensors.sample_ids.data(),
              grows ? nullptr : tensors.token_ids.data(),
              grows ? tensors.ids.data() : nullptr, tensors.gains.data()});
  return tensors;
}

void TestThereAndBack() {
  for (int round = 0; round < 200; ++round) {
    std::vector<StackedFeature> features;
    std::vector<FeatureCsr> batches;
    const int64_t count = 1 + Random(4);
    const bool grows = Random(2);
    for (int64_t f = 0; f < count; ++f) {
      features.push_back({"f", 10 * f, 1 + Random(10)});
      batches.push_back(
          RandomBatch(Random(6), features[f].vocabulary_size, grows));
    }
    const Tensors tensors = Write(features, batches, grows);
    std::vector<FeatureCsr> read(count);
    std::vector<FeatureCsr*> pointers;
    for (int64_t f = 0; f < count; ++f) {
      read[f].output_shape = batches[f].output_shape;
      pointers.push_back(&read[f]);
    }
    const Error error = ReadStack(features, tensors.View(), pointers);
    CHECK_EQ(error.value_or(""), "");
    for (int64_t f = 0; f < count; ++f) {
      CHECK_EQ(read[f].num_samples(), batches[f].num_samples());
      for (int64_t s = 0; s <= read[f].num_samples(); ++s) {
        CHECK_EQ(read[f].offsets[s], batches[f].offsets[s]);
      }
      for (int64_t s = 0; s < read[f].num_samples(); ++s) {
        for (int64_t i = read[f].offsets[s]; i < read[f].offsets[s + 1]; ++i) {
          if (read[f].ids.size()) {
            CHECK_EQ(read[f].ids[i], batches[f].ids[i]);
          } else {
            CHECK_EQ(read[f].rows[i], batches[f].rows[i]);
          }
          CHECK_EQ(read[f].gain(s, i), batches[f].gain(s, i));
        }
      }
    }
  }
}

void TestAnything() {
  const std::vector<StackedFeature> features = {{"a", 0, 3}, {"b", 3, 2}};
  int errors = 0;
  for (int round = 0; round < 5000; ++round) {
    Tensors tensors;
    for (int64_t i = Random(6); i > 0; --i) {
      tensors.row_pointers.push_back(static_cast<int32_t>(Random(7)) - 1);
    }
    const int64_t entries = Random(5);
    for (int64_t i = 0; i < entries; ++i) {
      tensors.token_ids.push_back(static_cast<int32_t>(Random(7)) - 1);
      tensors.gains.push_back(1.0f);
    }
    if (Random(5) == 0) tensors.gains.push_back(1.0f);
    FeatureCsr a, b;
    a.output_shape = {Random(4) - 1};
    b.output_shape = {Random(2), Random(100) ? 1 : int64_t{1} << 40};
    errors += ReadStack(features, tensors.View(), {&a, &b}).has_value();
  }
  CHECK_LT(errors, 5000);
  CHECK_GT(errors, 2500);
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestThereAndBack();
  tpu_embedding::TestAnything();
}
