#include "kernels/plan.h"

#include <map>
#include <mutex>
#include <utility>

#include "core/row_options.h"
#include "kernels/waiting.h"

namespace tpu_embedding {
namespace {

using tensorflow::NameAttrList;
using tensorflow::OpKernelConstruction;

// Finds the value of `name`, the content of the field `field`, in `names`.
template <class T>
absl::Status Choose(const char* field, const std::string& name,
                    const std::map<std::string, T>& names, T* value) {
  const auto found = names.find(name);
  if (found == names.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("A malformed graph: `", field, "` is ", name, "."));
  }
  *value = found->second;
  return absl::OkStatus();
}

absl::Status ReadIdle(const Record& record, TablePlan* table) {
  std::vector<Record> idle;
  TF_RETURN_IF_ERROR(record.Get("idle", &idle));
  if (idle.empty()) return absl::OkStatus();
  const auto rule = std::make_shared<IdleRule>();
  TF_RETURN_IF_ERROR(ReadIdleRule(idle[0], rule.get()));
  TF_RETURN_IF_ERROR(
      CheckLength("fades", rule->fades.size(), table->rule->num_slots));
  TF_RETURN_IF_ERROR(record.Get("history", &table->history));
  if (table->history < 2) return CheckLength("history", table->history, 2);
  table->idle = rule;
  return absl::OkStatus();
}

absl::Status ReadOptimizer(const Record& record, TablePlan* table) {
  std::string rule;
  TF_RETURN_IF_ERROR(record.Get("rule", &rule));
  if (rule.empty()) return absl::OkStatus();
  table->rule = FindRule(rule);
  if (!table->rule) {
    return absl::InvalidArgumentError(absl::StrCat(
        "There is no update rule named ", rule,
        ". If the Python package has this rule, the compiled library is "
        "older than the package. Rebuild the library: run `make ops` in a "
        "checkout, or reinstall the package."));
  }
  TF_RETURN_IF_ERROR(record.Get("hyperparameters", &table->hyperparameters));
  TF_RETURN_IF_ERROR(CheckLength("hyperparameters",
                                 table->hyperparameters.size(),
                                 table->rule->num_hyperparameters));
  const auto options = std::make_shared<RowOptions>();
  TF_RETURN_IF_ERROR(
      record.Get("clip_gradient_norm", &options->clip_gradient_norm));
  TF_RETURN_IF_ERROR(
      record.Get("clip_gradient_min", &options->clip_gradient_min));
  TF_RETURN_IF_ERROR(
      record.Get("clip_gradient_max", &options->clip_gradient_max));
  TF_RETURN_IF_ERROR(record.Get("clip_weight_min", &options->clip_weight_min));
  TF_RETURN_IF_ERROR(record.Get("clip_weight_max", &options->clip_weight_max));
  TF_RETURN_IF_ERROR(
      record.Get("weight_decay_factor", &options->weight_decay_factor));
  TF_RETURN_IF_ERROR(
      record.Get("multiply_decay_by_rate", &options->multiply_decay_by_rate));
  TF_RETURN_IF_ERROR(record.Get("all_rows", &options->all_rows));
  table->options = options;
  return ReadIdle(record, table);
}

absl::Status ReadFirstValues(const Record& record, FirstValues* values) {
  using Kind = FirstValues::Kind;
  static const auto* kinds = new std::map<std::string, Kind>{
      {"constant", Kind::kConstant},
      {"uniform", Kind::kUniform},
      {"normal", Kind::kNormal},
      {"truncated_normal", Kind::kTruncatedNormal}};
  std::string kind;
  float first = 0.0f;
  float second = 0.0f;
  int64_t seed = 0;
  TF_RETURN_IF_ERROR(record.Get("first_values", &kind));
  TF_RETURN_IF_ERROR(record.Get("first", &first));
  TF_RETURN_IF_ERROR(record.Get("second", &second));
  TF_RETURN_IF_ERROR(record.Get("seed", &seed));
  values->first = first;
  values->second = second;
  values->seed = seed;
  return Choose("first_values", kind, *kinds, &values->kind);
}

// Reads the vocabulary of a growing table, which has at most `rows` rows.
absl::Status ReadVocabulary(const Record& record, TablePlan* table) {
  static const auto* unknowns =
      new std::map<std::string, Unknown>{{"zeros", Unknown::kZeros},
                                         {"initializer", Unknown::kInitializer},
                                         {"shared_row", Unknown::kShared}};
  static const auto* evictions =
      new std::map<std::string, Eviction>{{"", Eviction::kNone},
                                          {"lru", Eviction::kLeastRecent},
                                          {"lfu", Eviction::kLeastFrequent},
                                          {"age", Eviction::kAge}};
  VocabularyOptions& options = table->vocabulary.emplace();
  options.table = table->name;
  options.max_rows = table->rows;
  std::string eviction, unknown;
  TF_RETURN_IF_ERROR(record.Get("min_rows", &options.min_rows));
  TF_RETURN_IF_ERROR(record.Get("min_count", &options.min_count));
  TF_RETURN_IF_ERROR(record.Get("max_candidates", &options.max_candidates));
  TF_RETURN_IF_ERROR(record.Get("eviction", &eviction));
  TF_RETURN_IF_ERROR(record.Get("max_age", &options.max_age));
  TF_RETURN_IF_ERROR(record.Get("clock", &options.has_clock));
  TF_RETURN_IF_ERROR(record.Get("unknown", &unknown));
  TF_RETURN_IF_ERROR(record.Get("shares_when_full", &options.shares_when_full));
  TF_RETURN_IF_ERROR(record.Get("first_slots", &table->first_slots));
  const int num_slots = table->rule ? table->rule->num_slots : 0;
  TF_RETURN_IF_ERROR(
      CheckLength("first_slots", table->first_slots.size(), num_slots));
  TF_RETURN_IF_ERROR(
      Choose("eviction", eviction, *evictions, &options.eviction));
  TF_RETURN_IF_ERROR(Choose("unknown", unknown, *unknowns, &options.unknown));
  return ReadFirstValues(record, &options.first_values);
}

absl::Status ReadTable(const Record& record, TablePlan* table) {
  TF_RETURN_IF_ERROR(record.Get("name", &table->name));
  TF_RETURN_IF_ERROR(record.Get("rows", &table->rows));
  TF_RETURN_IF_ERROR(record.Get("dim", &table->dim));
  static const auto* storages =
      new std::map<std::string, RowStorage>{{"float32", RowStorage::kFloat32},
                                            {"bfloat16", RowStorage::kBFloat16},
                                            {"int8", RowStorage::kInt8}};
  std::string storage;
  TF_RETURN_IF_ERROR(record.Get("storage", &storage));
  TF_RETURN_IF_ERROR(Choose("storage", storage, *storages, &table->storage));
  if (table->rows < 1 || table->rows > kMaxRows || table->dim < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "A malformed graph: a table of ", table->rows, " rows and ", table->dim,
        " columns; int32 must be able to number the rows."));
  }
  int64_t buckets = 0;
  TF_RETURN_IF_ERROR(record.Get("num_buckets", &buckets));
  if (buckets < 0 || buckets > kMaxRows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "A malformed graph: `quantization` with ", buckets, " buckets."));
  }
  table->quantization.num_buckets = buckets;
  TF_RETURN_IF_ERROR(record.Get("lower", &table->quantization.lower));
  TF_RETURN_IF_ERROR(record.Get("upper", &table->quantization.upper));
  int64_t seed = 0;
  TF_RETURN_IF_ERROR(record.Get("rounding_seed", &seed));
  table->rounding_seed = seed;
  TF_RETURN_IF_ERROR(ReadOptimizer(record, table));
  std::vector<Record> vocabulary;
  TF_RETURN_IF_ERROR(record.Get("vocabulary", &vocabulary));
  return vocabulary.empty() ? absl::OkStatus()
                            : ReadVocabulary(vocabulary[0], table);
}

absl::Status ReadStacks(const Record& record,
                        const std::vector<Record>& features, Plan* plan) {
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(record.Get("stacks", &names));
  plan->stacks.resize(names.size());
  for (size_t k = 0; k < names.size(); ++k) plan->stacks[k].name = names[k];
  if (names.empty()) return absl::OkStatus();
  for (size_t f = 0; f < features.size(); ++f) {
    int stack = 0;
    int64_t row_offset = 0;
    TF_RETURN_IF_ERROR(features[f].Get("stack", &stack));
    TF_RETURN_IF_ERROR(features[f].Get("row_offset", &row_offset));
    TF_RETURN_IF_ERROR(CheckIndices("stack", {stack}, names.size()));
    const FeatureSpec& spec = plan->features[f];
    plan->stacks[stack].features.push_back(f);
    plan->stacks[stack].grows = spec.grows;
    plan->stacks[stack].stacked.push_back(
        {spec.path, row_offset, spec.vocabulary_size});
  }
  return absl::OkStatus();
}

absl::Status ReadPlacement(const Record& record, Plan* plan) {
  Placement& placement = plan->placement;
  TF_RETURN_IF_ERROR(record.Get("process", &placement.rank));
  TF_RETURN_IF_ERROR(record.Get("num_processes", &placement.size));
  TF_RETURN_IF_ERROR(record.Get("served", &placement.served));
  TF_RETURN_IF_ERROR(record.Get("owners", &placement.owners));
  TF_RETURN_IF_ERROR(record.Get("bfloat16_wire", &plan->bfloat16_wire));
  TF_RETURN_IF_ERROR(CheckIndices("process", {placement.rank}, placement.size));
  if (placement.size == 1 && placement.owners.empty()) return absl::OkStatus();
  for (const int owner : placement.owners) {
    if (owner == kAllProcesses) continue;
    TF_RETURN_IF_ERROR(CheckIndices("owners", {owner}, placement.size));
  }
  TF_RETURN_IF_ERROR(
      CheckLength("owners", placement.owners.size(), plan->tables.size()));
  for (size_t t = 0; t < plan->tables.size(); ++t) {
    std::optional<VocabularyOptions>& options = plan->tables[t].vocabulary;
    if (!options || !placement.by_rows(t)) continue;
    options->table = absl::StrCat(options->table, " (part ", placement.rank,
                                  " of ", placement.size, ")");
  }
  return absl::OkStatus();
}

absl::Status ParsePlan(const std::string& text, Plan* plan) {
  Record record;
  TF_RETURN_IF_ERROR(record.Parse(text));
  TF_RETURN_IF_ERROR(record.Get("check_numerics", &plan->check_numerics));
  TF_RETURN_IF_ERROR(record.Get("num_replicas", &plan->num_replicas));
  TF_RETURN_IF_ERROR(record.Get("capacity", &plan->capacity));
  TF_RETURN_IF_ERROR(record.Get("pipelined", &plan->pipelined));
  if (plan->num_replicas < 1) {
    return CheckLength("num_replicas", plan->num_replicas, 1);
  }
  std::vector<Record> tables, features;
  TF_RETURN_IF_ERROR(record.Get("tables", &tables));
  TF_RETURN_IF_ERROR(record.Get("features", &features));
  for (const Record& own : tables) {
    TablePlan table;
    TF_RETURN_IF_ERROR(ReadTable(own, &table));
    plan->table_map.vocabulary_sizes.push_back(table.rows);
    plan->tables.push_back(std::move(table));
  }
  for (const Record& own : features) {
    int table = 0;
    TF_RETURN_IF_ERROR(own.Get("table", &table));
    TF_RETURN_IF_ERROR(CheckIndices("table", {table}, plan->tables.size()));
    FeatureSpec spec;
    TF_RETURN_IF_ERROR(ReadFeature(own, &spec));
    TF_RETURN_IF_ERROR(
        CheckLength("rows", spec.vocabulary_size, plan->tables[table].rows));
    std::vector<int64_t> hash_keys;
    TF_RETURN_IF_ERROR(own.Get("hash_keys", &hash_keys));
    if (!hash_keys.empty()) spec.hash_key = hash_keys[0];
    spec.check_numerics = plan->check_numerics;
    spec.grows = plan->tables[table].vocabulary.has_value();
    plan->tables[table].features.push_back(plan->features.size());
    plan->feature_tables.push_back(table);
    plan->features.push_back(std::move(spec));
  }
  plan->num_arrays = plan->tables.size();
  for (TablePlan& table : plan->tables) {
    if (ArrayBytes(table.storage, table.dim)[1]) {
      table.grids = plan->num_arrays++;
    }
  }
  plan->table_map.feature_tables = plan->feature_tables;
  for (const TablePlan& table : plan->tables) {  // For ReadCaughtUp.
    plan->table_map.places.push_back(table.idle && !table.vocabulary &&
                                     table.features.size() == 1);
  }
  TF_RETURN_IF_ERROR(ReadPlacement(record, plan));
  return ReadStacks(record, features, plan);
}

}  // namespace

absl::Status Record::Parse(const std::string& text) {
  if (fields_.ParseFromString(text)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "A malformed graph: an attribute cannot be parsed as named fields. Trace "
      "the function again.");
}

absl::Status Record::Read(OpKernelConstruction* context, const char* name) {
  std::string text;
  TF_RETURN_IF_ERROR(context->GetAttr(name, &text));
  return Parse(text);
}

absl::Status Record::Get(const char* name, std::vector<Record>* records) const {
  std::vector<NameAttrList> lists;
  TF_RETURN_IF_ERROR(Get(name, &lists));
  for (NameAttrList& list : lists) records->emplace_back(std::move(list));
  return absl::OkStatus();
}

absl::Status ReadFeature(const Record& record, FeatureSpec* spec) {
  static const auto* combiners =
      new std::map<std::string, Combiner>{{"sum", Combiner::kSum},
                                          {"mean", Combiner::kMean},
                                          {"sqrtn", Combiner::kSqrtn}};
  static const auto* policies =
      new std::map<std::string, InvalidIds>{{"error", InvalidIds::kError},
                                            {"drop", InvalidIds::kDrop},
                                            {"mod", InvalidIds::kMod}};
  std::string combiner, invalid_ids;
  TF_RETURN_IF_ERROR(record.Get("path", &spec->path));
  TF_RETURN_IF_ERROR(record.Get("table_name", &spec->table));
  TF_RETURN_IF_ERROR(record.Get("rows", &spec->vocabulary_size));
  TF_RETURN_IF_ERROR(record.Get("combiner", &combiner));
  TF_RETURN_IF_ERROR(record.Get("invalid_ids", &invalid_ids));
  TF_RETURN_IF_ERROR(record.Get("sequence_length", &spec->sequence_length));
  if (spec->vocabulary_size < 1 || spec->vocabulary_size > kMaxRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("A malformed graph: a table of ", spec->vocabulary_size,
                     " rows; int32 must be able to number them."));
  }
  if (spec->sequence_length < 0) {
    return CheckLength("sequence_length", spec->sequence_length, 0);
  }
  TF_RETURN_IF_ERROR(Choose("combiner", combiner, *combiners, &spec->combiner));
  return Choose("invalid_ids", invalid_ids, *policies, &spec->invalid_ids);
}

absl::Status ReadPlan(OpKernelConstruction* context, SharedPlan* plan) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<std::string, std::weak_ptr<const Plan>>;
  std::string text;
  TF_RETURN_IF_ERROR(context->GetAttr("plan", &text));
  const std::lock_guard<std::mutex> lock(*mutex);
  std::weak_ptr<const Plan>& kept = (*known)[text];
  *plan = kept.lock();
  if (*plan) return absl::OkStatus();
  auto parsed = std::make_shared<Plan>();
  const absl::Status status = ParsePlan(text, parsed.get());
  if (!status.ok()) {
    known->erase(text);
    return status;
  }
  kept = *plan = parsed;
  // This removes plans that no op uses any more.
  for (auto entry = known->begin(); entry != known->end();) {
    entry = entry->second.expired() ? known->erase(entry) : std::next(entry);
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
