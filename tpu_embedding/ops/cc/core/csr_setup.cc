// CompleteSetup checks a partitioning.

#include <limits>
#include <map>

#include "core/csr.h"
#include "core/csr_errors.h"
#include "core/text.h"

namespace tpu_embedding {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

Error CheckFeature(const CsrSetup& setup, const CsrTable& table,
                   const CsrFeature& feature) {
  const auto bad = [&](const char* what, int64_t value, int64_t divisor) {
    return Concat("Feature ", feature.spec.path, " of table ", table.name,
                  ": its ", what, " is ", value, ", which must be a multiple ",
                  "of ", divisor, " and lie inside of the table.");
  };
  const int64_t cores = setup.num_cores;
  const int64_t shards = setup.num_shards();
  if (feature.samples < 1 || feature.samples % cores != 0) {
    return bad("number of samples", feature.samples, cores);
  }
  if (feature.sample_offset < 0 || feature.sample_offset % cores != 0 ||
      feature.sample_offset > table.samples - feature.samples) {
    return bad("first sample", feature.sample_offset, cores);
  }
  const int64_t tokens = (feature.spec.vocabulary_size + shards - 1) / shards;
  if (feature.spec.vocabulary_size < 1 || feature.row_offset < 0 ||
      feature.row_offset % shards != 0 ||
      feature.row_offset > table.rows - tokens * shards) {
    return bad("first row", feature.row_offset, shards);
  }
  int64_t product = 1;
  for (const int64_t axis : feature.spec.declared_shape) product *= axis;
  if (!feature.spec.shape_known || product != feature.samples) {
    return Concat("Feature ", feature.spec.path, ": its output shape has ",
                  product, " samples, but ", feature.samples, " are declared.");
  }
  return std::nullopt;
}

Error CheckTable(const CsrSetup& setup, const CsrTable& table) {
  if (table.rows < 1 || table.rows > kMaxRows ||
      table.rows % setup.num_shards() != 0) {
    return Concat("Table ", table.name, " has ", table.rows, " rows; it must ",
                  "have from 1 to ", kMaxRows, ", a multiple of the ",
                  setup.num_shards(), " SparseCores of all devices.");
  }
  const int64_t capacity = setup.IdCapacity(table);
  if (capacity < 1 || capacity % kCsrAlignment != 0 || capacity > kMaxRows) {
    return IdBufferSizeText(table.name, capacity);
  }
  for (const int f : table.features) {
    Error error = CheckFeature(setup, table, setup.features[f]);
    if (error) return error;
  }
  return std::nullopt;
}

// Adds the groups of one table. The features of a group agree on its place.
Error AddGroups(CsrSetup* setup, int t) {
  std::map<int64_t, CsrGroup> groups;  // by first row
  const int64_t shards = setup->num_shards();
  for (const int f : setup->tables[t].features) {
    const CsrFeature& feature = setup->features[f];
    const TablePlace place{
        shards, feature.rotation % shards, feature.row_offset / shards,
        (feature.spec.vocabulary_size + shards - 1) / shards};
    CsrGroup& group = groups[feature.row_offset];
    if (group.features.empty()) group.place = place;
    if (group.place.rotation != place.rotation ||
        group.place.num_tokens != place.num_tokens) {
      return Concat("Feature ", feature.spec.path, ": the features of one ",
                    "table must have the same rotation and vocabulary size.");
    }
    group.table = t;
    group.features.push_back(f);
  }
  int64_t next_token = 0;
  for (auto& [row, group] : groups) {
    if (group.place.row_offset < next_token) {
      return Concat("Table ", setup->tables[t].name, ": two of its tables ",
                    "overlap at row ", row, ".");
    }
    next_token = group.place.row_offset + group.place.num_tokens;
    for (const int f : group.features) {
      setup->features[f].group = static_cast<int>(setup->groups.size());
    }
    setup->groups.push_back(std::move(group));
  }
  return std::nullopt;
}

}  // namespace

Error CompleteSetup(CsrSetup* setup) {
  setup->groups.clear();
  for (size_t t = 0; t < setup->tables.size(); ++t) {
    Error error = CheckTable(*setup, setup->tables[t]);
    if (!error) error = AddGroups(setup, static_cast<int>(t));
    if (error) return error;
  }
  return std::nullopt;
}

}  // namespace tpu_embedding
