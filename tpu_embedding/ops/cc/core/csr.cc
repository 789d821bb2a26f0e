#include "core/csr.h"

#include <algorithm>
#include <limits>

#include "core/csr_errors.h"

namespace tpu_embedding {
namespace {

// Rough cycles for one id.
constexpr int64_t kCyclesPerRow = 2;
constexpr int64_t kCyclesPerId = 40;
constexpr int64_t kCyclesPerWrite = 10;

Error FirstOf(const std::vector<Error>& errors) {
  for (const Error& error : errors) {
    if (error) return error;
  }
  return std::nullopt;
}

int64_t CountIds(const std::vector<FeatureInput>& inputs) {
  int64_t count = 0;
  for (const FeatureInput& input : inputs) count += input.num_ids;
  return count;
}

// Returns the smallest span with the samples of all features of a group.
SampleSpan SpanOf(const std::vector<SampleRange>& ranges) {
  int64_t first = std::numeric_limits<int64_t>::max();
  int64_t end = 0;
  for (const SampleRange& range : ranges) {
    first = std::min(first, range.first_sample);
    end = std::max(end, range.first_sample + range.end - range.begin);
  }
  return {first, end - first};
}

}  // namespace

Error CsrBatch::Prepare(const std::vector<FeatureInput>& inputs,
                        const std::vector<uint64_t>& splits,
                        const ParallelFor& parallel_for) {
  Error error = ReadFeatures(inputs, parallel_for);
  if (!error) error = SortUnits(inputs, parallel_for);
  if (error) return error;
  results_.resize(setup_.tables.size());
  dropped_.assign(num_groups(), 0);
  for (size_t t = 0; t < setup_.tables.size(); ++t) {
    error = FinishTable(static_cast<int>(t), splits[t]);
    if (error) return error;
  }
  return std::nullopt;
}

Error CsrBatch::ReadFeatures(const std::vector<FeatureInput>& inputs,
                             const ParallelFor& parallel_for) {
  const int64_t num_features = setup_.features.size();
  rows_.clear();  // those of the batch before
  rows_.resize(num_features);
  std::vector<Error> errors(num_features);
  const int64_t cost =
      kCyclesPerRow * CountIds(inputs) / std::max<int64_t>(num_features, 1) + 1;
  parallel_for(num_features, cost, [&](int64_t begin, int64_t end) {
    for (int64_t f = begin; f < end; ++f) {
      const FeatureSpec& spec = setup_.features[f].spec;
      errors[f] = ReadRows(spec, inputs[f], &rows_[f]);
      // The samples of a sequence leave out entries, so all are checked here.
      if (!errors[f] && rows_[f].positions) {
        errors[f] = CheckEntries(spec, inputs[f], rows_[f]);
      }
    }
  });
  return FirstOf(errors);
}

Error CsrBatch::SortUnits(const std::vector<FeatureInput>& inputs,
                          const ParallelFor& parallel_for) {
  const int64_t num_units = setup_.num_cores * num_groups();
  units_.resize(num_units);
  std::vector<Error> errors(setup_.features.size() * setup_.num_cores);
  const int64_t cost =
      kCyclesPerId * CountIds(inputs) / std::max<int64_t>(num_units, 1) + 1;
  parallel_for(num_units, cost, [&](int64_t begin, int64_t end) {
    const std::shared_ptr<Scratch> scratch = scratch_->Take();
    for (int64_t u = begin; u < end; ++u) {
      SortUnit(inputs, u / num_groups(), u % num_groups(), scratch.get(),
               &errors);
    }
  });
  return FirstOf(errors);
}

CsrForm CsrBatch::FormOf(const CsrGroup& group,
                         const std::vector<FeatureInput>& inputs,
                         int64_t capacity) const {
  if (setup_.tables[group.table].keep_positions) return CsrForm::kPositions;
  bool ones = capacity < kMaxOnes;
  for (const int f : group.features) {
    const CsrFeature& feature = setup_.features[f];
    ones = ones && !inputs[f].weights && !feature.max_valency &&
           feature.spec.combiner == Combiner::kSum;
  }
  return ones ? CsrForm::kOnes : CsrForm::kGains;
}

void CsrBatch::SortUnit(const std::vector<FeatureInput>& inputs, int64_t core,
                        int64_t g, Scratch* scratch,
                        std::vector<Error>* errors) {
  const CsrGroup& group = setup_.groups[g];
  const int64_t cores = setup_.num_cores;
  std::vector<SampleRange> ranges;
  int64_t capacity = 0;
  for (const int f : group.features) {
    const CsrFeature& feature = setup_.features[f];
    const int64_t samples = feature.samples / cores;
    ranges.push_back(
        {core * samples, (core + 1) * samples, feature.sample_offset / cores});
    capacity += CountEntries(inputs[f], rows_[f], ranges.back());
  }
  CsrEntries* entries = &scratch->entries;
  entries->Start(group.place, SpanOf(ranges), capacity,
                 FormOf(group, inputs, capacity));
  for (size_t i = 0; i < ranges.size(); ++i) {
    const int f = group.features[i];
    const CsrFeature& feature = setup_.features[f];
    Error error = AppendEntries(feature.spec, inputs[f], rows_[f], ranges[i],
                                feature.max_valency, entries);
    if (error) {
      (*errors)[f * cores + core] = std::move(error);
      return;
    }
  }
  SortIntoPartitions(entries, &scratch->sort, &unit(core, g).partitions);
}

Error CsrBatch::FinishTable(int table, uint64_t splits) {
  CsrResult* result = &results_[table];
  *result = CsrResult();
  result->splits = splits;
  Error error = CheckPartitions(table, result);
  if (error && setup_.minibatching) error = FindTableSplits(table, result);
  if (!error) error = PlaceTable(table, result);
  return error;
}

// Sets `largest`. Returns an error for the first partition above the limits.
Error CsrBatch::CheckPartitions(int table, CsrResult* result) {
  const CsrTable& spec = setup_.tables[table];
  Error error;
  std::vector<IdCounts> counts(setup_.num_shards());
  for (int64_t core = 0; core < setup_.num_cores; ++core) {
    std::fill(counts.begin(), counts.end(), IdCounts());
    for (int64_t g = 0; g < num_groups(); ++g) {
      if (setup_.groups[g].table != table) continue;
      const Partitions& p = unit(core, g).partitions;
      for (int64_t s = 0; s < setup_.num_shards(); ++s) {
        counts[s] = counts[s] + p.counts(s);
      }
    }
    for (int64_t s = 0; s < setup_.num_shards(); ++s) {
      const IdCounts& c = counts[s];
      result->largest.ids = std::max(result->largest.ids, c.ids);
      result->largest.unique = std::max(result->largest.unique, c.unique);
      if (error || c.Within(spec.limit)) continue;
      const bool unique = c.ids <= spec.limit.ids;
      error =
          PartitionLimitText(spec.name, s, unique, unique ? c.unique : c.ids,
                             unique ? spec.limit.unique : spec.limit.ids);
    }
  }
  return error;
}

Error CsrBatch::FindTableSplits(int table, CsrResult* result) {
  const CsrTable& spec = setup_.tables[table];
  const int64_t shards = setup_.num_shards();
  const int64_t width = BucketWidth(spec.rows);
  for (int64_t core = 0; core < setup_.num_cores; ++core) {
    for (int64_t s = 0; s < shards; ++s) {
      BucketCounts buckets{};
      for (int64_t g = 0; g < num_groups(); ++g) {
        if (setup_.groups[g].table != table) continue;
        AddBuckets(unit(core, g).partitions, s, width, &buckets);
      }
      const int above = FirstBucketAbove(buckets, spec.limit);
      if (above >= 0) {
        return BucketLimitText(spec.name, s, above, buckets[above].ids,
                               buckets[above].unique);
      }
      result->splits |= FindSplits(buckets, spec.limit);
    }
  }
  return std::nullopt;
}

void CsrBatch::CutUnit(int64_t width, const std::vector<int>& bounds,
                       Unit* unit) const {
  const Partitions& p = unit->partitions;
  unit->cuts.clear();
  for (int64_t s = 0; s < setup_.num_shards(); ++s) {
    unit->cuts.push_back(p.begins[s]);
    for (size_t m = 1; m + 1 < bounds.size(); ++m) {
      unit->cuts.push_back(FirstOfRow(p, s, bounds[m] * width));
    }
    unit->cuts.push_back(p.begins[s + 1]);
  }
}

Error CsrBatch::PlaceTable(int table, CsrResult* result) {
  const CsrTable& spec = setup_.tables[table];
  const std::vector<int> bounds = MinibatchBounds(result->splits);
  const int64_t minibatches = bounds.size() - 1;
  if (minibatches > setup_.max_minibatches) {
    return MinibatchesText(spec.name, minibatches, setup_.max_minibatches);
  }
  const CsrCells cells{setup_.num_cores, minibatches, setup_.num_shards()};
  std::vector<int64_t> counts(cells.size());
  for (int64_t core = 0; core < setup_.num_cores; ++core) {
    for (int64_t g = 0; g < num_groups(); ++g) {
      if (setup_.groups[g].table != table) continue;
      Unit& u = unit(core, g);
      CutUnit(BucketWidth(spec.rows), bounds, &u);
      u.places.resize(cells.num_shards * minibatches);
      for (int64_t s = 0; s < cells.num_shards; ++s) {
        for (int64_t m = 0; m < minibatches; ++m) {
          // The cell's start is not known yet, so the place is relative to it.
          const int64_t* cut = &u.cuts[s * (minibatches + 1) + m];
          int64_t& count = counts[cells.index(core, m, s)];
          u.places[s * minibatches + m] = count;
          count += cut[1] - cut[0];
        }
      }
    }
  }
  result->layout = LayOut(cells, counts, setup_.IdCapacity(spec));
  if (result->layout.dropped_ids > 0 && !setup_.allow_id_dropping) {
    return IdBufferText(spec.name, result->layout.required_ids,
                        setup_.IdCapacity(spec));
  }
  if (result->layout.dropped_ids > 0) CountDropped(table);
  return std::nullopt;
}

// Returns how many entries of a unit in one cell have room in the buffer.
int64_t CsrBatch::Kept(int64_t core, int64_t g, int64_t s, int64_t m) const {
  const Unit& u = units_[core * num_groups() + g];
  const CsrLayout& layout = results_[setup_.groups[g].table].layout;
  const int64_t minibatches = layout.cells.num_minibatches;
  const int64_t* cut = &u.cuts[s * (minibatches + 1) + m];
  const int64_t cell = layout.cells.index(core, m, s);
  const int64_t out = layout.starts[cell] + u.places[s * minibatches + m];
  return std::clamp<int64_t>(layout.ends[cell] - out, 0, cut[1] - cut[0]);
}

void CsrBatch::CountDropped(int table) {
  const CsrCells& cells = results_[table].layout.cells;
  for (int64_t g = 0; g < num_groups(); ++g) {
    if (setup_.groups[g].table != table) continue;
    for (int64_t core = 0; core < cells.num_cores; ++core) {
      dropped_[g] += unit(core, g).partitions.size;
      for (int64_t s = 0; s < cells.num_shards; ++s) {
        for (int64_t m = 0; m < cells.num_minibatches; ++m) {
          dropped_[g] -= Kept(core, g, s, m);
        }
      }
    }
  }
}

void CsrBatch::Write(const std::vector<CsrArrays>& arrays,
                     const ParallelFor& parallel_for) const {
  for (size_t t = 0; t < results_.size(); ++t) {
    WriteFrame(results_[t].layout, arrays[t]);
  }
  int64_t entries = 0;
  for (const Unit& u : units_) entries += u.partitions.size;
  const int64_t num_units = units_.size();
  const int64_t cost =
      kCyclesPerWrite * entries / std::max<int64_t>(num_units, 1) + 1;
  parallel_for(num_units, cost, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t g = u % num_groups();
      WriteUnit(u / num_groups(), g, arrays[setup_.groups[g].table]);
    }
  });
}

void CsrBatch::WriteUnit(int64_t core, int64_t g,
                         const CsrArrays& arrays) const {
  const CsrGroup& group = setup_.groups[g];
  const Unit& u = units_[core * num_groups() + g];
  const CsrLayout& layout = results_[group.table].layout;
  const CsrCells& cells = layout.cells;
  for (int64_t s = 0; s < cells.num_shards; ++s) {
    for (int64_t m = 0; m < cells.num_minibatches; ++m) {
      const int64_t* cut = &u.cuts[s * (cells.num_minibatches + 1) + m];
      const int64_t cell = cells.index(core, m, s);
      const int64_t out =
          layout.starts[cell] + u.places[s * cells.num_minibatches + m];
      WriteEntries(u.partitions, s, cut[0], cut[0] + Kept(core, g, s, m), out,
                   arrays);
    }
  }
}

}  // namespace tpu_embedding
