#include "tpu_v2_v4/engine/tables.h"

#include <algorithm>

#include "core/pieces.h"
#include "core/text.h"

namespace tpu_embedding {
namespace {

// Rough cycles for one sample or row.
constexpr int64_t kTableCyclesPerRow = 400;

}  // namespace

EngineTables::EngineTables(const EngineConfig* config) : config_(*config) {
  for (const EngineTable& table : config_.tables) {
    Storage storage;
    storage.values.resize(1 + table.slots.size());
    storage.loaded.resize(config_.num_hosts);
    storage_.push_back(std::move(storage));
  }
}

void EngineTables::Load(int table, int host,
                        const std::vector<const float*>& values) {
  const EngineTable& shape = config_.tables[table];
  const HostRows rows(config_, table);
  for (size_t k = 0; k < values.size(); ++k) {
    std::vector<float>& stored = storage_[table].values[k];
    // Tables take memory only here: those that are never loaded take none.
    stored.resize(shape.num_rows * shape.dim);
    for (int64_t i = 0; i < rows.Count(host); ++i) {
      std::copy_n(values[k] + i * shape.dim, shape.dim,
                  stored.data() + rows.Row(host, i) * shape.dim);
    }
  }
  storage_[table].loaded[host] = true;
}

void EngineTables::Retrieve(int table, int host,
                            const std::vector<float*>& values) const {
  const int64_t dim = config_.tables[table].dim;
  const HostRows rows(config_, table);
  for (size_t k = 0; k < values.size(); ++k) {
    const std::vector<float>& stored = storage_[table].values[k];
    for (int64_t i = 0; i < rows.Count(host); ++i) {
      std::copy_n(stored.data() + rows.Row(host, i) * dim, dim,
                  values[k] + i * dim);
    }
  }
}

Error EngineTables::CheckLoaded(int table, int host) const {
  if (storage_[table].loaded[host]) return std::nullopt;
  return Concat("Table ", config_.tables[table].name, ": shard ", host, " of ",
                config_.num_hosts, " has not been loaded.");
}

Error EngineTables::CheckLoaded() const {
  for (size_t table = 0; table < storage_.size(); ++table) {
    for (int host = 0; host < config_.num_hosts; ++host) {
      if (Error error = CheckLoaded(table, host)) return error;
    }
  }
  return std::nullopt;
}

void EngineTables::LookUp(const CoreBatch& batch,
                          const std::vector<float*>& outputs,
                          const ParallelFor& parallel_for) const {
  std::vector<Work> works;
  for (const EngineOutput& output : config_.outputs) {
    works.push_back(
        {output.num_samples(), output.num_samples() * kTableCyclesPerRow});
  }
  ForEachPiece(parallel_for, works, [&](const Piece& piece) {
    const int64_t o = piece.owner;
    const int table = config_.outputs[o].table;
    Lookup(batch.prepared.features[o], storage_[table].values[0].data(),
           config_.tables[table].dim, config_.tables[table].quantization,
           piece.begin, piece.end, outputs[o]);
  });
}

void EngineTables::Update(const StepBatches& batches,
                          const StepGradients& gradients,
                          const ParallelFor& parallel_for) {
  for (size_t table = 0; table < storage_.size(); ++table) {
    UpdateTable(table, batches, gradients, parallel_for);
  }
}

void EngineTables::UpdateTable(int table, const StepBatches& batches,
                               const StepGradients& gradients,
                               const ParallelFor& parallel_for) {
  const EngineTable& shape = config_.tables[table];
  const float rate =
      shape.rate_tag < 0 ? shape.rate : gradients.rates[shape.rate_tag];
  TableEntries entries;
  std::vector<std::vector<const float*>> samples(batches.size());
  for (size_t core = 0; core < batches.size(); ++core) {
    for (size_t o = 0; o < config_.outputs.size(); ++o) {
      if (config_.outputs[o].table != table) continue;
      entries.features.push_back(batches[core]->prepared.features[o]);
      for (int64_t s = 0; s < config_.outputs[o].num_samples(); ++s) {
        samples[core].push_back(gradients.values[core][o] + s * shape.dim);
      }
    }
  }
  if (!shape.accumulates) {
    for (size_t core = 0; core < batches.size(); ++core) {
      Apply(table, rate, batches[core]->prepared.tables[table], samples[core],
            parallel_for);
    }
    return;
  }
  // The groups treat the batches of all cores as one batch.
  RowGroups merged;
  entries.vocabulary_size = shape.num_rows;
  entries.groups = &merged;
  GroupByRow({entries}, parallel_for);
  for (size_t core = 1; core < batches.size(); ++core) {
    samples[0].insert(samples[0].end(), samples[core].begin(),
                      samples[core].end());
  }
  Apply(table, rate, merged, samples[0], parallel_for);
}

void EngineTables::Apply(int table, float rate, const RowGroups& groups,
                         const std::vector<const float*>& samples,
                         const ParallelFor& parallel_for) {
  const EngineTable& shape = config_.tables[table];
  std::vector<std::vector<float>>& values = storage_[table].values;
  TableView view;
  view.parameters = values[0].data();
  view.num_rows = shape.num_rows;
  view.dim = shape.dim;
  for (size_t k = 1; k < values.size(); ++k) {
    view.slots.push_back(values[k].data());
  }
  const RuleArguments arguments = {shape.hyperparameters, rate};
  const TableGradients gradients = {&groups, samples.data()};
  parallel_for(
      UpdatesAllRows(*shape.options) ? shape.num_rows : groups.num_rows(),
      kTableCyclesPerRow, [&](int64_t begin, int64_t end) {
        shape.update(arguments, *shape.options, gradients, view, begin, end);
      });
}

}  // namespace tpu_embedding
