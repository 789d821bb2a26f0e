// BuildCsr: each kind of input, each rule for bad ids, each refusal.

#include "core/feature.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

FeatureSpec Spec(InputKind kind, Combiner combiner = Combiner::kSum) {
  FeatureSpec spec;
  spec.path = "user/film";
  spec.table = "films";
  spec.vocabulary_size = 10;
  spec.kind = kind;
  spec.combiner = combiner;
  return spec;
}

FeatureInput Input(const std::vector<int64_t>& ids,
                   const std::vector<int64_t>& structure,
                   std::vector<int64_t> shape) {
  FeatureInput input;
  input.ids64 = ids.data();
  input.num_ids = ids.size();
  input.structure = structure.data();
  input.structure_size = structure.size();
  input.shape = std::move(shape);
  return input;
}

template <class T, class U>
void CheckList(const Buffer<T>& buffer, const std::vector<U>& expected) {
  CHECK_EQ(buffer.size(), static_cast<int64_t>(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK_EQ(buffer[i], expected[i]);
  }
}

void CheckCsr(const FeatureSpec& spec, const FeatureInput& input,
              const std::vector<int64_t>& shape,
              const std::vector<int64_t>& offsets,
              const std::vector<int64_t>& rows,
              const std::vector<float>& gains) {
  FeatureCsr csr;
  CHECK_EQ(BuildCsr(spec, input, &csr).value_or(""), "");
  CHECK_TRUE(csr.output_shape == shape);
  CheckList(csr.offsets, offsets);
  CheckList(csr.rows, rows);
  CHECK_EQ(csr.gains.size(), input.weights ? csr.rows.size() : 0);
  const bool by_sample = !input.weights && spec.combiner != Combiner::kSum;
  CHECK_EQ(csr.sample_gains.size(), by_sample ? csr.num_samples() : 0);
  CHECK_EQ(rows.size(), gains.size());
  for (int64_t s = 0; s < csr.num_samples(); ++s) {
    for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
      CHECK_EQ(csr.gain(s, i), gains[i]);
    }
  }
}

void CheckRefused(const FeatureSpec& spec, const FeatureInput& input,
                  const std::string& text) {
  FeatureCsr csr;
  CHECK_EQ(BuildCsr(spec, input, &csr).value_or("accepted"), text);
}

void TestDense() {
  const std::vector<int64_t> ids{3, 3, 9, 0};
  const FeatureSpec mean = Spec(InputKind::kDense, Combiner::kMean);
  CheckCsr(mean, Input(ids, {}, {4}), {4}, {0, 1, 2, 3, 4}, ids, {1, 1, 1, 1});
  CheckCsr(mean, Input(ids, {}, {2, 2}), {2}, {0, 2, 4}, ids,
           {.5f, .5f, .5f, .5f});
  CheckCsr(mean, Input(ids, {}, {2, 1, 2}), {2, 1}, {0, 2, 4}, ids,
           {.5f, .5f, .5f, .5f});
  CheckCsr(mean, Input({}, {}, {0}), {0}, {0}, {}, {});
  CheckCsr(mean, Input({}, {}, {3, 0}), {3}, {0, 0, 0, 0}, {}, {});
}

void TestGains() {
  const std::vector<int64_t> ids{1, 2, 3, 4};
  const std::vector<float> weights{3, -4, 1, -1};
  FeatureInput input = Input(ids, {}, {2, 2});
  input.weights = weights.data();
  CheckCsr(Spec(InputKind::kDense), input, {2}, {0, 2, 4}, ids, weights);
  // 1 - 1 is a divisor of exactly 0: all gains of that sample are 0.
  CheckCsr(Spec(InputKind::kDense, Combiner::kMean), input, {2}, {0, 2, 4}, ids,
           {-3, 4, 0, 0});
  const float half = 1 / std::sqrt(2.0f);
  CheckCsr(Spec(InputKind::kDense, Combiner::kSqrtn), input, {2}, {0, 2, 4},
           ids, {.6f, -.8f, half, -half});
}

void TestSparse() {
  const std::vector<int64_t> ids{5, 6, 7};
  const std::vector<int64_t> indices{0, 1, 0, 3, 2, 0};
  const FeatureInput input = Input(ids, indices, {4, 5});
  FeatureSpec spec = Spec(InputKind::kSparse);
  CheckCsr(spec, input, {4}, {0, 2, 2, 3, 3}, ids, {1, 1, 1});
  spec.sequence_length = 2;  // columns are positions; column 3 is cut
  CheckCsr(spec, input, {4, 2}, {0, 0, 1, 1, 1, 2, 2, 2, 2}, {5, 7}, {1, 1});
  const std::vector<int64_t> cubic{0, 1, 0, 0, 1, 1, 1, 0, 0};
  CheckCsr(Spec(InputKind::kSparse), Input(ids, cubic, {2, 2, 2}), {2, 2},
           {0, 0, 2, 3, 3}, ids, {1, 1, 1});
}

void TestRagged() {
  const std::vector<int64_t> ids{5, 6, 7, 8};
  const std::vector<int64_t> splits{0, 3, 3, 4, 4};
  const FeatureInput input = Input(ids, splits, {4});
  FeatureSpec spec = Spec(InputKind::kRagged);
  CheckCsr(spec, input, {4}, {0, 3, 3, 4, 4}, ids, {1, 1, 1, 1});
  spec.shape_known = true;
  spec.declared_source = "build()";
  spec.declared_shape = {2, 2};
  CheckCsr(spec, input, {2, 2}, {0, 3, 3, 4, 4}, ids, {1, 1, 1, 1});
  spec.declared_shape = {-1, 2};
  CheckCsr(spec, input, {2, 2}, {0, 3, 3, 4, 4}, ids, {1, 1, 1, 1});
  spec.declared_shape = {2, 4};  // twice the rows: each has two positions
  CheckCsr(spec, input, {2, 4}, {0, 1, 2, 2, 2, 3, 3, 3, 3}, {5, 6, 8},
           {1, 1, 1});
  spec.declared_shape = {0};
  CheckRefused(spec, input,
               "Feature user/film: a ragged input of 4 rows does not fill the "
               "output shape (0,) that build() declares.");
  spec.declared_shape = {8};  // A batch of 8, of which 4 are missing.
  CheckRefused(spec, input,
               "Feature user/film: a ragged input of 4 rows does not fill the "
               "output shape (8,) that build() declares.");
  spec.declared_shape = {3};
  CheckRefused(spec, input,
               "Feature user/film: a ragged input of 4 rows does not fill the "
               "output shape (3,) that build() declares.");
}

void TestInvalidIds() {
  const std::vector<int64_t> ids{-1, 4, 10, int64_t{1} << 40};
  const FeatureInput input = Input(ids, {}, {2, 2});
  FeatureSpec spec = Spec(InputKind::kDense, Combiner::kMean);
  CheckRefused(spec, input,
               "Feature user/film, table films: sample 0 has id -1, but ids "
               "must be in [0, 10). Fix the input, or set "
               "invalid_ids=\"drop\" or \"mod\" where the table or the "
               "embedding is configured.");
  spec.invalid_ids = InvalidIds::kDrop;  // also from the divisor
  CheckCsr(spec, input, {2}, {0, 1, 1}, {4}, {1});
  spec.invalid_ids = InvalidIds::kMod;
  CheckCsr(spec, input, {2}, {0, 2, 4}, {9, 4, 0, (int64_t{1} << 40) % 10},
           {.5f, .5f, .5f, .5f});
  // A bad id past the end of a sequence is cut, but still an error.
  spec.invalid_ids = InvalidIds::kError;
  spec.sequence_length = 1;
  FeatureCsr csr;
  const std::vector<int64_t> cut{4, 99};
  CHECK_TRUE(BuildCsr(spec, Input(cut, {}, {1, 2}), &csr));
  // Of several bad ids the first is told, whether it is kept or cut.
  const std::vector<int64_t> bad{97, 98, 99};
  for (const int64_t length : {1, 2, 3}) {
    spec.sequence_length = length;
    CHECK_TRUE(BuildCsr(spec, Input(bad, {}, {1, 3}), &csr)
                   .value_or("accepted")
                   .find("sample 0 has id 97,") != std::string::npos);
  }
}

void TestRefusedStructures() {
  const std::vector<int64_t> ids{1, 2};
  const FeatureSpec ragged = Spec(InputKind::kRagged);
  CheckRefused(ragged, Input(ids, {1, 2}, {1}),
               "Feature user/film: row_splits must start at 0.");
  CheckRefused(ragged, Input(ids, {0, 2, 1, 2}, {3}),
               "Feature user/film: row_splits must not decrease, but row 1 "
               "goes from 2 to 1.");
  CheckRefused(ragged, Input(ids, {0, 3}, {1}),
               "Feature user/film: row_splits end at 3 but there are 2 ids.");
  const FeatureSpec sparse = Spec(InputKind::kSparse);
  CheckRefused(sparse, Input(ids, {0, 0, 2, 0}, {2, 2}),
               "Feature user/film: sparse entry 1 has an index outside of "
               "dense_shape (2, 2).");
  const int64_t far = int64_t{1} << 62;  // times an axis: past any integer
  CheckRefused(sparse, Input(ids, {0, 0, 0, far, far, 0}, {2, 8, 2}),
               "Feature user/film: sparse entry 1 has an index outside of "
               "dense_shape (2, 8, 2).");
  const std::string order =
      "Feature user/film: sparse entry 1 is out of order or occurs twice. "
      "Call tf.sparse.reorder first and keep one entry per index.";
  CheckRefused(sparse, Input(ids, {1, 0, 0, 1}, {2, 2}), order);
  CheckRefused(sparse, Input(ids, {1, 0, 1, 0}, {2, 2}), order);
  for (const int64_t rows : {int64_t{-1}, int64_t{1} << 62}) {
    CheckRefused(sparse, Input({}, {}, {rows, 4}),
                 std::string("Feature user/film: the shape (") +
                     (rows < 0 ? "None" : std::to_string(rows)) +
                     ",) has a negative axis or more than 16777216 samples.");
  }
  FeatureSpec huge = Spec(InputKind::kDense);
  huge.sequence_length = int64_t{1} << 40;
  FeatureCsr csr;
  CHECK_TRUE(BuildCsr(huge, Input(ids, {}, {2, 1}), &csr));
  const std::vector<int64_t> other{0, 1, 2};
  const std::vector<int64_t> splits{0, 2, 2};
  FeatureInput input = Input(ids, splits, {2});
  input.weight_structure = other.data();
  input.weight_structure_size = other.size();
  CheckRefused(ragged, input,
               "Feature user/film: the weights must have the row_splits of the "
               "ids. Build them with `with_values`.");
}

void TestNumericsAndShapes() {
  const std::vector<int64_t> ids{1, 2};
  const std::vector<float> weights{1, std::numeric_limits<float>::infinity()};
  FeatureSpec spec = Spec(InputKind::kDense);
  FeatureInput input = Input(ids, {}, {2});
  input.weights = weights.data();
  CheckCsr(spec, input, {2}, {0, 1, 2}, ids, weights);
  spec.check_numerics = true;
  CheckRefused(spec, input,
               "Feature user/film: sample 1 has a weight that is not finite "
               "(inf).");
  spec = Spec(InputKind::kDense);
  spec.shape_known = true;
  spec.declared_source = "build()";
  spec.declared_shape = {3};
  CheckRefused(spec, input,
               "Feature user/film: the input gives output shape (2,), not (3,) "
               "that build() declares.");
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestDense();
  tpu_embedding::TestGains();
  tpu_embedding::TestSparse();
  tpu_embedding::TestRagged();
  tpu_embedding::TestInvalidIds();
  tpu_embedding::TestRefusedStructures();
  tpu_embedding::TestNumericsAndShapes();
}
