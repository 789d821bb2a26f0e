// Features of any sort -> the partitioned CSR of SparseCores: what is accepted
// holds all that docs/formats.md says of it, and nothing is written outside.

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/csr.h"
#include "fuzz.h"

namespace tpu_embedding::fuzz {
namespace {

struct Ragged {
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<int64_t> splits{0};
  bool weighted = false;

  FeatureInput view() const {
    FeatureInput input;
    input.ids64 = ids.data();
    input.num_ids = ids.size();
    input.weights = weighted ? weights.data() : nullptr;
    input.structure = splits.data();
    input.structure_size = splits.size();
    input.shape = {static_cast<int64_t>(splits.size()) - 1};
    return input;
  }
};

Ragged ReadRagged(Bytes& bytes, int64_t samples, int64_t vocabulary_size) {
  Ragged ragged;
  ragged.weighted = bytes.Number(0, 1);
  if (bytes.Number(0, 15) == 0) samples += bytes.Number(-1, 1);
  for (int64_t s = 0; s < samples; ++s) {
    for (int64_t n = bytes.Number(0, 5); n > 0; --n) {
      ragged.ids.push_back(bytes.Number(0, 7)
                               ? bytes.Byte() % vocabulary_size
                               : bytes.AnyNumber(vocabulary_size));
      ragged.weights.push_back(static_cast<float>(bytes.Number(0, 3)));
    }
    ragged.splits.push_back(ragged.ids.size());
  }
  if (bytes.Number(0, 31) == 0) {
    ragged.splits[bytes.Byte() % ragged.splits.size()] = bytes.AnyNumber(8);
  }
  return ragged;
}

CsrSetup ReadSetup(Bytes& bytes, std::vector<Ragged>* inputs) {
  CsrSetup setup;
  setup.num_cores = bytes.Number(1, 4);
  setup.num_replicas = bytes.Number(1, 4);
  setup.max_ids_per_chip_per_sample = 8 * bytes.Number(1, 12);
  setup.allow_id_dropping = bytes.Number(0, 1);
  setup.minibatching = bytes.Number(0, 1);
  setup.max_minibatches = int64_t{1} << bytes.Number(0, 6);
  for (int64_t tables = bytes.Number(1, 2); tables > 0; --tables) {
    CsrTable table;
    table.name = "stack" + std::to_string(tables);
    table.limit = {bytes.Number(1, 40), bytes.Number(1, 40)};
    table.keep_positions = bytes.Number(0, 1);
    for (int64_t parts = bytes.Number(1, 3); parts > 0; --parts) {
      CsrFeature feature;
      feature.spec.path = "f" + std::to_string(setup.features.size());
      feature.spec.table = "t";
      feature.spec.kind = InputKind::kRagged;
      feature.spec.vocabulary_size = bytes.Number(1, 150);
      feature.spec.combiner = static_cast<Combiner>(bytes.Number(0, 2));
      feature.spec.invalid_ids = static_cast<InvalidIds>(bytes.Number(0, 2));
      feature.samples = setup.num_cores * bytes.Number(1, 4);
      feature.spec.shape_known = true;
      feature.spec.declared_shape = {feature.samples};
      feature.spec.declared_source = "a test";
      feature.row_offset = table.rows;
      feature.rotation = bytes.Number(0, 5);
      feature.max_valency = bytes.Number(0, 3) ? 0 : bytes.Number(1, 4);
      feature.sample_offset = table.samples;
      const int64_t block = 8 * setup.num_shards();
      table.rows += (feature.spec.vocabulary_size + block - 1) / block * block;
      table.samples += feature.samples;
      if (bytes.Number(0, 63) == 0) feature.row_offset += bytes.Number(0, 9);
      table.features.push_back(static_cast<int>(setup.features.size()));
      inputs->push_back(
          ReadRagged(bytes, feature.samples, feature.spec.vocabulary_size));
      setup.features.push_back(feature);
    }
    setup.tables.push_back(table);
  }
  return setup;
}

void InLine(int64_t total, int64_t, const Range& body) { body(0, total); }

void OnThreads(int64_t total, int64_t, const Range& body) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < total; ++i) {
    threads.emplace_back([&body, i] { body(i, i + 1); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Arrays of exactly the promised size.
struct Arrays {
  explicit Arrays(const CsrLayout& layout)
      : pointers(new int32_t[layout.row_pointers_size]),
        samples(new int32_t[layout.ids_size]),
        tokens(new int32_t[layout.ids_size]),
        positions(new int32_t[layout.ids_size]),
        gains(new float[layout.ids_size]) {}

  std::unique_ptr<int32_t[]> pointers, samples, tokens, positions;
  std::unique_ptr<float[]> gains;
};

void CheckTable(const CsrSetup& setup, const CsrTable& table,
                const CsrResult& result, const Arrays& arrays) {
  const CsrLayout& layout = result.layout;
  Require(layout.ids_size <= setup.IdCapacity(table), "the ids fit");
  Require(layout.row_pointers_size <= setup.RowPointersCapacity(),
          "the row pointers fit");
  Require(setup.allow_id_dropping || layout.dropped_ids == 0,
          "nothing is dropped unasked");
  const int64_t samples = table.samples / setup.num_cores;
  const int64_t tokens = table.rows / setup.num_shards();
  for (int64_t cell = 0; cell < layout.cells.size(); ++cell) {
    Require(layout.starts[cell] % kCsrAlignment == 0, "partitions are aligned");
    Require(layout.starts[cell] <= layout.ends[cell] &&
                layout.ends[cell] <= layout.ids_size,
            "partitions lie in the buffer");
    for (int64_t i = layout.starts[cell]; i < layout.ends[cell]; ++i) {
      Require(arrays.samples[i] >= 0 && arrays.samples[i] < samples,
              "samples are of the SparseCore");
      Require(arrays.tokens[i] >= 0 && arrays.tokens[i] < tokens,
              "tokens are of the shard");
      Require(
          i == layout.starts[cell] || arrays.tokens[i - 1] <= arrays.tokens[i],
          "tokens ascend in a partition");
    }
  }
}

}  // namespace

bool FuzzCsr(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  std::vector<Ragged> inputs;
  CsrSetup setup = ReadSetup(bytes, &inputs);
  if (CompleteSetup(&setup)) return false;
  std::vector<FeatureInput> views;
  for (const Ragged& input : inputs) views.push_back(input.view());
  std::vector<uint64_t> splits(setup.tables.size());
  for (uint64_t& split : splits) {
    split = bytes.Number(0, 3) ? 0 : uint64_t(bytes.AnyNumber(64));
  }
  CsrBatch batch(setup);
  const ParallelFor pool =
      bytes.Number(0, 15) == 0 ? ParallelFor(OnThreads) : ParallelFor(InLine);
  if (batch.Prepare(views, splits, pool)) return false;
  std::vector<Arrays> arrays;
  std::vector<CsrArrays> pointers;
  for (size_t t = 0; t < setup.tables.size(); ++t) {
    arrays.emplace_back(batch.result(t).layout);
    pointers.push_back(
        {arrays[t].pointers.get(), arrays[t].samples.get(),
         arrays[t].tokens.get(), arrays[t].gains.get(),
         setup.tables[t].keep_positions ? arrays[t].positions.get() : nullptr});
  }
  batch.Write(pointers, pool);
  for (size_t t = 0; t < setup.tables.size(); ++t) {
    CheckTable(setup, setup.tables[t], batch.result(t), arrays[t]);
  }
  return true;
}

}  // namespace tpu_embedding::fuzz
