// The embedding engine of TPU v2, v3 and v4: outputs, modes and waiting calls.
// tests/software_tpu and tests/tpu_v2_v4 have its numbers and bad inputs.

#include "tpu_v2_v4/engine/engine.h"

#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/optimizers/sgd.h"
#include "core/update-inl.h"
#include "tpu_v2_v4/engine/batch.h"
#include "tpu_v2_v4/engine/pending_calls.h"

namespace tpu_embedding {
namespace {

using Seconds = std::chrono::seconds;
using Clock = PendingCalls::Clock;

const ParallelFor kSerial = [](int64_t total, int64_t, const Range& body) {
  if (total > 0) body(0, total);
};

EngineTable MakeTable(const std::string& name, int64_t rows) {
  EngineTable table;
  table.name = name;
  table.num_rows = rows;
  table.dim = 1;
  table.optimizer = "sgd";
  table.update = &Update<Sgd>;
  table.options = std::make_shared<RowOptions>();
  table.rate = 1.0f;
  return table;
}

// One table of the rows 0, 1, ... and one feature of two samples for a core.
EngineConfig MakeConfig(int num_cores) {
  EngineConfig config;
  config.tables = {MakeTable("films", 10)};
  config.outputs = {{"watched", 0, {2}}};
  config.num_cores = num_cores;
  return config;
}

EnqueueInput Input(const std::vector<int64_t>& ids,
                   std::vector<int64_t> structure = {}) {
  EnqueueInput input;
  input.ids64 = ids.data();
  input.num_ids = ids.size();
  input.structure = std::move(structure);
  input.structure_rank = 1;
  return input;
}

// The entries of a feature as "sample:row*gain".
std::string Text(const FeatureCsr& csr) {
  std::string text;
  for (int64_t s = 0; s < csr.num_samples(); ++s) {
    for (int64_t i = csr.offsets[s]; i < csr.offsets[s + 1]; ++i) {
      std::string gain = std::to_string(csr.gain(s, i));
      text += " " + std::to_string(s) + ":" + std::to_string(csr.rows[i]) +
              "*" + gain.substr(0, 4);
    }
  }
  return text;
}

// The entries of the first output, or the error.
std::string Built(const EngineConfig& config, EnqueueInputs enqueued) {
  CoreBatch batch;
  const Error error = BuildBatch(config, enqueued, kSerial, &batch);
  return error ? *error : Text(batch.prepared.features[0]);
}

bool Contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::cerr << text << " has no " << part << "\n";
  return false;
}

// Without features, the samples of all inputs of a table alternate.
void TestTableOutputs() {
  EngineConfig config = MakeConfig(1);
  config.batch_size = 2;
  config.outputs = {{"films", 0, {2 * 4}}};
  const std::vector<int64_t> ids = {7, 2};
  const std::vector<int64_t> three = {3, 4, 5};
  EnqueueInput plain = Input(ids, {0, 1, 2});
  EnqueueInput sequence = Input(three, {0, 3, 3});
  EnqueueInput pair = Input(three, {0, 1, 2, 3, 3});
  plain.table = sequence.table = pair.table = 0;
  sequence.max_sequence_length = 2;
  pair.num_features = 2;
  CHECK_EQ(Built(config, {{plain, sequence, plain}, {}, false}),
           " 0:7*1.00 1:3*1.00 2:4*1.00 3:7*1.00 4:2*1.00 7:2*1.00");
  CHECK_EQ(Built(config, {{pair, plain, plain}, {}, false}),
           " 0:3*1.00 1:4*1.00 2:7*1.00 3:7*1.00 4:5*1.00 6:2*1.00 7:2*1.00");
  CHECK_TRUE(
      Contains(Built(config, {{plain, plain}, {}, false}), "inputs fill 2"));
  CHECK_TRUE(Contains(Built(config, {{pair, pair, plain}, {}, false}),
                      "takes only 4"));
  plain.table = -1;
  CHECK_TRUE(Contains(Built(config, {{plain}, {}, false}), "`table_ids`"));
}

// An engine whose only table starts as 0, 1, ..., and its calls.
class Program {
 public:
  explicit Program(EngineConfig config) : engine(std::move(config)) {
    std::vector<float> rows(engine.config().tables[0].num_rows);
    std::iota(rows.begin(), rows.end(), 0.0f);
    engine.Load(0, 0, {rows.data()}, kSerial);
  }

  Outcome Enqueue(int core, const std::vector<int64_t>& ids, bool training) {
    auto batch = std::make_shared<CoreBatch>();
    CHECK_TRUE(!BuildBatch(engine.config(), {{Input(ids)}, {}, training},
                           kSerial, batch.get()));
    return engine.Enqueue({{core, batch, nullptr}});
  }

  // The first activation of each core, or the negative kind of the outcome.
  std::vector<float> Receive() {
    const int cores = engine.config().num_cores;
    std::vector<std::vector<float>> values(cores, std::vector<float>(2));
    std::vector<std::vector<float*>> outputs;
    for (auto& value : values) outputs.push_back({value.data()});
    const Outcome outcome = engine.Receive(outputs, nullptr, kSerial);
    if (!outcome.done()) return {-static_cast<float>(outcome.kind)};
    std::vector<float> first;
    for (const auto& value : values) first.push_back(value[0]);
    return first;
  }

  // The same gradient for all samples of core k: gradients[k].
  Outcome Send(const std::vector<float>& gradients) {
    auto kept = std::make_shared<std::vector<std::vector<float>>>();
    StepGradients step;
    for (const float gradient : gradients)
      kept->push_back({gradient, gradient});
    for (const auto& values : *kept) step.values.push_back({values.data()});
    step.keep = kept;
    return engine.Send(std::move(step), kSerial);
  }

  std::vector<float> Rows() {
    std::vector<float> rows(engine.config().tables[0].num_rows);
    CHECK_TRUE(engine.Retrieve(0, 0, {rows.data()}, kSerial).done());
    return rows;
  }

  Engine engine;
};

using Floats = std::vector<float>;

#define CHECK_FLOATS(a, ...) CHECK_TRUE((a) == (Floats{__VA_ARGS__}))

void TestModesMustAgree() {
  Program program(MakeConfig(2));
  CHECK_TRUE(program.Enqueue(0, {3, 4}, true).done());
  CHECK_TRUE(program.Enqueue(1, {3, 4}, false).done());
  CHECK_FLOATS(program.Receive(), -float{Outcome::kWrongOrder});
  CHECK_FLOATS(program.Receive(), -float{Outcome::kWaits});
}

// Core by core: clipped at 1, twice.
void TestWithoutAccumulation() {
  for (const bool accumulates : {false, true}) {
    EngineConfig config = MakeConfig(2);
    config.tables[0].accumulates = accumulates;
    config.tables[0].options->clip_gradient_max = 1.0f;
    Program program(config);
    for (const int core : {0, 1}) {
      CHECK_TRUE(program.Enqueue(core, {5, 0}, true).done());
    }
    CHECK_FLOATS(program.Receive(), 5, 5);
    CHECK_TRUE(program.Send({4, 4}).done());
    CHECK_EQ(program.Rows()[5], accumulates ? 4.0f : 3.0f);
  }
}

// A call that waits until `ready`, and how it ended.
struct Waiter {
  Waiter() : call(std::make_shared<PendingCalls::Call>()) {
    call->attempt = [this] {
      return ready ? Outcome() : Outcome{Outcome::kWaits, "Nobody came."};
    };
    call->done = [this](const Outcome& outcome) { ended.push_back(outcome); };
  }

  bool ready = false;
  std::vector<Outcome> ended;
  std::shared_ptr<PendingCalls::Call> call;
};

void TestWaits() {
  const Clock::time_point start;
  PendingCalls calls(Seconds(10));
  Waiter woken, late, cancelled, never;
  for (Waiter* waiter : {&woken, &late, &cancelled}) {
    calls.Submit(waiter->call, start);
    CHECK_EQ(waiter->ended.size(), 0);
  }
  woken.ready = true;
  CHECK_TRUE(calls.Run([] { return Outcome(); }).done());
  CHECK_EQ(woken.ended.size(), 1);
  CHECK_TRUE(woken.ended[0].done());
  calls.Cancel(cancelled.call);
  CHECK_EQ(cancelled.ended[0].kind, Outcome::kCancelled);
  calls.CheckTime(start + Seconds(9));
  CHECK_EQ(late.ended.size(), 0);
  calls.CheckTime(start + Seconds(10));
  CHECK_EQ(late.ended[0].kind, Outcome::kTimedOut);
  CHECK_EQ(late.ended[0].text, "Nobody came. Waited for 10 seconds.");
  calls.Cancel(never.call);
  calls.Submit(never.call, start);
  CHECK_EQ(never.ended[0].kind, Outcome::kCancelled);
  CHECK_EQ(woken.ended.size() + late.ended.size() + cancelled.ended.size(), 3);
}

void TestClosedRooms() {
  PendingCalls calls(Seconds(10));
  Waiter before, after;
  calls.Submit(before.call, Clock::now());
  calls.Close("The end.");
  calls.Submit(after.call, Clock::now());
  CHECK_EQ(before.ended[0].text, "The end.");
  CHECK_EQ(after.ended[0].text, "The end.");
  CHECK_EQ(calls.Run([] { return Outcome(); }).kind, Outcome::kWrongOrder);
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  using namespace tpu_embedding;
  TestTableOutputs();
  TestModesMustAgree();
  TestWithoutAccumulation();
  TestWaits();
  TestClosedRooms();
}
