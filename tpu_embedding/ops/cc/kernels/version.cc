// Tells which TensorFlow this library was compiled against.

#ifndef TPU_EMBEDDING_TF_VERSION
#error "setup.py and BUILD define TPU_EMBEDDING_TF_VERSION"
#endif

namespace {

// ops/library.py looks for this text in the file before it loads it: a library
// of another TensorFlow may crash while it is being loaded.
constexpr char kMarker[] =
    "tpu_embedding built for TensorFlow " TPU_EMBEDDING_TF_VERSION;
constexpr int kVersionOffset =
    sizeof(kMarker) - sizeof(TPU_EMBEDDING_TF_VERSION);

}  // namespace

extern "C" __attribute__((visibility("default"))) const char*
TpuEmbeddingTensorFlowVersion() {
  return kMarker + kVersionOffset;
}
