// Loads a SavedModel with nothing but TensorFlow's C API and runs one
// signature.
//
//   run_signature FOLDER FETCH {FEED TYPE SHAPE VALUES}...
//
// FETCH and FEED are outputs of operations, "name:index". TYPE is i64 or f32,
// SHAPE and VALUES are numbers with commas between them; "-" stands for none.
// Prints the values of FETCH, one a line, in as many digits as a float has.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "saved_model.h"

enum { kMostFeeds = 32, kMostAxes = 8, kMostValues = 4096 };

// The numbers of a list with commas; returns how many.
static int Parse(const char* list, double* numbers, int most) {
  int count = 0;
  if (strcmp(list, "-") == 0) return 0;
  for (const char* at = list; at; at = strchr(at, ',')) {
    if (*at == ',') ++at;
    Require(count < most, "too many numbers", list);
    numbers[count++] = strtod(at, NULL);
  }
  return count;
}

static TF_Tensor* MakeTensor(const char* type, const char* shape,
                             const char* values) {
  static double numbers[kMostValues];
  double axes[kMostAxes];
  int64_t dims[kMostAxes];
  const int rank = Parse(shape, axes, kMostAxes);
  for (int i = 0; i < rank; ++i) dims[i] = (int64_t)axes[i];
  const int count = Parse(values, numbers, kMostValues);
  const int is_float = strcmp(type, "f32") == 0;
  const size_t bytes = count * (is_float ? sizeof(float) : sizeof(int64_t));
  TF_Tensor* tensor =
      TF_AllocateTensor(is_float ? TF_FLOAT : TF_INT64, dims, rank, bytes);
  for (int i = 0; i < count; ++i) {
    if (is_float) {
      ((float*)TF_TensorData(tensor))[i] = (float)numbers[i];
    } else {
      ((int64_t*)TF_TensorData(tensor))[i] = (int64_t)numbers[i];
    }
  }
  return tensor;
}

int main(int argc, char** argv) {
  Require(argc >= 3 && (argc - 3) % 4 == 0, "usage",
          "see the top of this file");
  TF_Status* status = TF_NewStatus();
  TF_Graph* graph = TF_NewGraph();
  TF_Session* session = Load(argv[1], graph, status);

  TF_Output fetch = Find(graph, argv[2]);
  TF_Output feeds[kMostFeeds];
  TF_Tensor* inputs[kMostFeeds];
  int count = 0;
  for (int at = 3; at < argc; at += 4, ++count) {
    Require(count < kMostFeeds, "too many inputs", argv[at]);
    feeds[count] = Find(graph, argv[at]);
    inputs[count] = MakeTensor(argv[at + 1], argv[at + 2], argv[at + 3]);
  }
  TF_Tensor* result = NULL;
  TF_SessionRun(session, NULL, feeds, inputs, count, &fetch, &result, 1, NULL,
                0, NULL, status);
  Require(TF_GetCode(status) == TF_OK, "run", TF_Message(status));

  Print(result);

  TF_DeleteTensor(result);
  for (int i = 0; i < count; ++i) TF_DeleteTensor(inputs[i]);
  Close(session, graph, status);
  return 0;
}
