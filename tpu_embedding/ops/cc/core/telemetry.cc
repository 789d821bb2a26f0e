#include "core/telemetry.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/idle.h"
#include "core/rows-inl.h"

namespace tpu_embedding {
namespace {

float Norm(const float* values, int64_t dim) {
  float squares = 0.0f;
  for (int64_t d = 0; d < dim; ++d) squares += values[d] * values[d];
  // The squares of large or small values do not fit float32.
  if (!std::isfinite(squares) || squares < 1e-30f) {
    double precise = 0.0;
    for (int64_t d = 0; d < dim; ++d) {
      precise += static_cast<double>(values[d]) * values[d];
    }
    return std::sqrt(precise);
  }
  return std::sqrt(squares);
}

void SumGroup(const TableGradients& gradients, int64_t group, int64_t dim,
              float* sum) {
  const RowGroups& groups = *gradients.groups;
  std::fill(sum, sum + dim, 0.0f);
  for (int64_t i = groups.starts[group]; i < groups.starts[group + 1]; ++i) {
    const float* gradient = gradients.samples[groups.samples[i]];
    if (!gradient) continue;
    const float gain = groups.gain(i);
    for (int64_t d = 0; d < dim; ++d) sum[d] += gain * gradient[d];
  }
}

}  // namespace

void CountedUpdate::Resize(int64_t num_groups, int64_t units) {
  rows.Resize(num_groups);
  ids.Resize(num_groups);
  gradient_norms.Resize(num_groups);
  update_norms.Resize(units);
}

void CountedUpdate::AddSamples(const FeatureCsr& feature) {
  invalid_ids += feature.num_invalid;
  samples += feature.num_samples();
  for (int64_t s = 0; s < feature.num_samples(); ++s) {
    samples_without_ids += feature.offsets[s] == feature.offsets[s + 1];
  }
}

void CountingObserver::Apply(const UpdatePiece& piece,
                             const std::function<void()>& apply) {
  const TableView& table = piece.view;
  const bool all_rows = piece.all_rows;
  const int64_t begin = piece.begin, end = piece.end, dim = table.dim;
  const RowGroups& groups = *piece.gradients.groups;
  CountedUpdate* counted = &tables[piece.table];
  const auto row = [&](int64_t unit) {
    return all_rows ? unit : groups.rows[unit];
  };
  Buffer<float> before((end - begin) * dim), values(dim);
  for (int64_t u = begin; u < end; ++u) {
    float* const old = before.data() + (u - begin) * dim;
    if (table.waiting) {  // What the row moved while it waited is no update.
      ReadCaughtUp(table, *table.waiting, row(u), old);
    } else {
      ReadRow(table.parameters, row(u), dim, old);
    }
  }
  apply();
  for (int64_t u = begin; u < end; ++u) {
    const float* old = before.data() + (u - begin) * dim;
    ReadRow(table.parameters, row(u), dim, values.data());
    for (int64_t d = 0; d < dim; ++d) values[d] -= old[d];
    counted->update_norms[u] = Norm(values.data(), dim);
  }
  const int32_t* first = groups.rows.data();
  const int32_t* last = first + groups.num_rows();
  const int64_t stop =
      all_rows ? std::lower_bound(first, last, end) - first : end;
  int64_t group =
      all_rows ? std::lower_bound(first, last, begin) - first : begin;
  for (; group < stop; ++group) {
    SumGroup(piece.gradients, group, dim, values.data());
    counted->rows[group] = groups.rows[group];
    counted->ids[group] = groups.starts[group + 1] - groups.starts[group];
    counted->gradient_norms[group] = Norm(values.data(), dim);
  }
}

bool Telemetry::Start(int64_t every, const std::vector<int64_t>& num_rows) {
  std::vector<RowCounts> counts;
  for (const int64_t size : every ? num_rows : std::vector<int64_t>()) {
    void* memory = std::calloc(std::max<int64_t>(size, 1), sizeof(uint32_t));
    if (!memory) return false;
    counts.emplace_back();
    counts.back().of_rows.reset(static_cast<uint32_t*>(memory));
    counts.back().size = size;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  steps_ = samples_ = counted_steps_ = 0;
  tables_ = std::vector<TableTelemetry>(counts.size());
  counts_ = std::move(counts);
  every_ = every;
  return true;
}

bool Telemetry::Next(int64_t samples) {
  if (every_.load(std::memory_order_relaxed) == 0) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t every = every_;
  samples_ += samples;
  return every > 0 && steps_++ % every == 0;
}

void Telemetry::Add(std::vector<CountedUpdate> tables) {
  std::lock_guard<std::mutex> lock(mutex_);
  // Telemetry was stopped, or started anew, since `Next`.
  if (tables.size() != tables_.size() || counted_steps_ == steps_) return;
  ++counted_steps_;
  for (size_t t = 0; t < tables.size(); ++t) {
    TableTelemetry& table = tables_[t];
    CountedUpdate& counted = tables[t];
    const int64_t num_rows = counted.rows.size();
    for (int64_t i = 0; i < num_rows; ++i) {
      uint32_t& count = counts_[t].of_rows[counted.rows[i]];
      const uint32_t room = std::numeric_limits<uint32_t>::max() - count;
      count += std::min(room, counted.ids[i]);
      table.ids += counted.ids[i];
    }
    table.distinct_ids += num_rows;
    table.invalid_ids += counted.invalid_ids;
    table.samples += counted.samples;
    table.samples_without_ids += counted.samples_without_ids;
    table.last = std::move(counted);
  }
}

void Telemetry::Read(const std::function<void(const View&)>& read) const {
  std::lock_guard<std::mutex> lock(mutex_);
  read({steps_, samples_, counted_steps_, tables_});
}

int64_t Telemetry::RowsTouched(int table) const {
  const uint32_t* counts = counts_[table].of_rows.get();
  return counts_[table].size -
         std::count(counts, counts + counts_[table].size, 0u);
}

std::vector<HotRow> Telemetry::Hottest(int table, int64_t count) const {
  const RowCounts& counts = counts_[table];
  const auto hotter = [](const HotRow& a, const HotRow& b) {
    return a.ids != b.ids ? a.ids > b.ids : a.row < b.row;
  };
  std::vector<HotRow> heap;  // The coldest of the hottest is its front.
  for (int64_t row = 0; row < counts.size && count > 0; ++row) {
    const HotRow candidate{row, counts.of_rows[row]};
    if (candidate.ids == 0) continue;
    if (static_cast<int64_t>(heap.size()) == count) {
      if (!hotter(candidate, heap.front())) continue;
      std::pop_heap(heap.begin(), heap.end(), hotter);
      heap.pop_back();
    }
    heap.push_back(candidate);
    std::push_heap(heap.begin(), heap.end(), hotter);
  }
  std::sort(heap.begin(), heap.end(), hotter);
  return heap;
}

}  // namespace tpu_embedding
