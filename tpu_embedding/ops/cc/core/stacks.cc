#include "core/stacks.h"

#include <algorithm>
#include <limits>

#include "core/feature_rows.h"
#include "core/text.h"

namespace tpu_embedding {
namespace {

template <class... Parts>
Error StackError(const StackInput& input, const Parts&... parts) {
  return Concat("Stacked table ", input.name, ": ", parts...,
                " Pass the second output of embedding_lookup unchanged.");
}

Error CheckPointers(const StackInput& input, int64_t num_samples) {
  if (input.num_row_pointers != num_samples + 1) {
    return StackError(input, input.num_row_pointers, " row_pointers for ",
                      num_samples,
                      " samples; the number of row_pointers must be 1 plus the "
                      "number of samples.");
  }
  const int32_t* pointers = input.row_pointers;
  if (pointers[0] != 0 || pointers[num_samples] != input.num_tokens ||
      input.num_gains != input.num_tokens ||
      !std::is_sorted(pointers, pointers + num_samples + 1)) {
    return StackError(input,
                      "row_pointers must rise from 0 to the number of "
                      "sorted_token_ids, which is that of sorted_gains.");
  }
  return std::nullopt;
}

Error ReadFeature(const StackedFeature& feature, const StackInput& input,
                  int64_t first_sample, int64_t num_samples,
                  FeatureCsr* batch) {
  const int32_t* pointers = input.row_pointers + first_sample;
  const int64_t first = pointers[0];
  const int64_t size = pointers[num_samples] - first;
  batch->offsets.Resize(num_samples + 1);
  batch->rows.Resize(input.ids ? 0 : size);
  batch->ids.Resize(input.ids ? size : 0);
  batch->gains.Resize(size);
  batch->sample_gains.Resize(0);
  for (int64_t s = 0; s <= num_samples; ++s) {
    batch->offsets[s] = pointers[s] - first;
  }
  std::copy_n(input.gains + first, size, batch->gains.data());
  if (input.ids) {
    std::copy_n(input.ids + first, size, batch->ids.data());
    return std::nullopt;
  }
  for (int64_t i = 0; i < size; ++i) {
    const int64_t row = input.token_ids[first + i] - feature.row_offset;
    if (row < 0 || row >= feature.vocabulary_size) {
      return StackError(input, "entry ", first + i, " has token id ",
                        input.token_ids[first + i],
                        ", but it belongs to feature ", feature.path,
                        ", whose table has the ids [", feature.row_offset, ", ",
                        feature.row_offset + feature.vocabulary_size, ").");
    }
    batch->rows[i] = static_cast<int32_t>(row);
  }
  return std::nullopt;
}

}  // namespace

void WriteStack(const std::vector<StackedFeature>& features,
                const std::vector<const FeatureCsr*>& batches,
                const StackOutput& output) {
  int32_t entry = 0;
  int32_t sample = 0;
  output.row_pointers[0] = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    const FeatureCsr& batch = *batches[f];
    for (int64_t s = 0; s < batch.num_samples(); ++s) {
      for (int64_t i = batch.offsets[s]; i < batch.offsets[s + 1]; ++i) {
        output.sample_ids[entry] = sample;
        if (output.ids) {
          output.ids[entry] = batch.ids[i];
        } else {
          output.token_ids[entry] =
              static_cast<int32_t>(features[f].row_offset + batch.rows[i]);
        }
        output.gains[entry++] = batch.gain(s, i);
      }
      output.row_pointers[++sample] = entry;
    }
  }
}

Error ReadStack(const std::vector<StackedFeature>& features,
                const StackInput& input,
                const std::vector<FeatureCsr*>& batches) {
  std::vector<int64_t> samples;
  int64_t total = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    samples.push_back(
        Product(batches[f]->output_shape, std::numeric_limits<int32_t>::max()));
    if (samples[f] < 0) {
      return StackError(input, "feature ", features[f].path,
                        " has a negative or too large number of samples.");
    }
    total += samples[f];
  }
  if (Error error = CheckPointers(input, total)) return error;
  int64_t first = 0;
  for (size_t f = 0; f < features.size(); ++f) {
    if (Error error =
            ReadFeature(features[f], input, first, samples[f], batches[f])) {
      return error;
    }
    first += samples[f];
  }
  return std::nullopt;
}

}  // namespace tpu_embedding
