// Pushes of functions that run several times: each is taken once.

#include "core/push_ledger.h"

#include <map>
#include <random>
#include <string>

#include "check.h"

namespace tpu_embedding {
namespace {

// What came of one push: "taken", "repeated", or the error.
std::string Bring(PushLedger* ledger, const Push& push,
                  const Error& failure = std::nullopt) {
  bool repeated = false;
  bool called = false;
  const Error error = ledger->Admit(
      push,
      [&] {
        called = true;
        return failure;
      },
      &repeated);
  CHECK_EQ(called, !repeated && (!error || failure.has_value()));
  if (error) return *error;
  return repeated ? "repeated" : "taken";
}

void TestRuns() {
  PushLedger ledger;
  // The first run is lost after its second push; the next one brings three.
  CHECK_EQ(Bring(&ledger, {1, 5, 100}), "taken");
  CHECK_EQ(Bring(&ledger, {1, 5, 100}), "taken");
  CHECK_EQ(Bring(&ledger, {1, 5, 200}), "repeated");
  CHECK_EQ(Bring(&ledger, {1, 5, 200}), "repeated");
  CHECK_EQ(Bring(&ledger, {1, 5, 200}), "taken");
  // It was not lost after all.
  CHECK_EQ(Bring(&ledger, {1, 5, 100}), "repeated");
  // Others are others.
  CHECK_EQ(Bring(&ledger, {1, 4, 100}), "taken");
  CHECK_EQ(Bring(&ledger, {2, 5, 100}), "taken");
}

void TestFailures() {
  PushLedger ledger;
  CHECK_EQ(Bring(&ledger, {1, 1, 7}, "bad gradient"), "bad gradient");
  CHECK_EQ(Bring(&ledger, {1, 1, 7}), "taken");
  CHECK_EQ(Bring(&ledger, {1, 1, 8}), "repeated");
}

void TestWindow() {
  PushLedger ledger(10);
  for (int number = 1; number <= 20; ++number) {
    CHECK_EQ(Bring(&ledger, {1, number, 7}), "taken");
  }
  CHECK_EQ(Bring(&ledger, {1, 11, 8}), "repeated");
  const std::string refused = Bring(&ledger, {1, 10, 8});
  CHECK_NE(refused.find("whether this push was already applied"),
           std::string::npos);
  CHECK_EQ(Bring(&ledger, {1, 21, 8}), "taken");
}

// Runs of functions in any order, each cut off anywhere, until all are done.
void TestRandomRuns() {
  std::mt19937_64 generator(20260731);
  for (int round = 0; round < 200; ++round) {
    PushLedger ledger;
    std::map<int, int> taken;
    const int functions = 5;
    const int pushes = 3;
    for (int run = 0; run < 40; ++run) {
      const int number = generator() % functions;
      const int length = run < 35 ? generator() % (pushes + 1) : pushes;
      for (int k = 0; k < length; ++k) {
        taken[number] += Bring(&ledger, {1, number, run}) == "taken";
      }
    }
    for (int number = 0; number < functions; ++number) {
      for (int k = 0; k < pushes; ++k) {
        taken[number] += Bring(&ledger, {1, number, 99}) == "taken";
      }
      CHECK_EQ(taken[number], pushes);
    }
  }
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestRuns();
  tpu_embedding::TestFailures();
  tpu_embedding::TestWindow();
  tpu_embedding::TestRandomRuns();
  return 0;
}
