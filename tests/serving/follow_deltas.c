// Applies deltas to a SavedModel with nothing but TensorFlow's C API, while
// threads look rows up.
//
//   follow_deltas FOLDER BLOCK SEQUENCE IDS ROWS COUNT THREADS DELTA...
//
// BLOCK and IDS are inputs, SEQUENCE and ROWS outputs of operations,
// "name:index". The threads look up ids 0 to COUNT - 1 all the time. A row
// whose values differ is torn; one whose value is less than that thread saw
// before went back.
//
// Prints for each delta its number, or why it was refused; then the rows that
// were read, torn and went back; then the values of all rows, one a line.

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "saved_model.h"

enum { kMostThreads = 64 };

static TF_Session* session;
static TF_Output ids_input, rows_output, block_input, sequence_output;
static int64_t count;
static atomic_int stop;
static atomic_long total, torn, back;

// Returns the output, or NULL with `status` set.
static TF_Tensor* Run(TF_Output feed, TF_Tensor* input, TF_Output fetch,
                      TF_Status* status) {
  TF_Tensor* result = NULL;
  TF_SessionRun(session, NULL, &feed, &input, 1, &fetch, &result, 1, NULL, 0,
                NULL, status);
  return result;
}

static TF_Tensor* LookUp(TF_Status* status) {
  TF_Tensor* ids =
      TF_AllocateTensor(TF_INT64, &count, 1, count * sizeof(int64_t));
  for (int64_t i = 0; i < count; ++i) ((int64_t*)TF_TensorData(ids))[i] = i;
  TF_Tensor* rows = Run(ids_input, ids, rows_output, status);
  Require(TF_GetCode(status) == TF_OK, "lookup", TF_Message(status));
  TF_DeleteTensor(ids);
  return rows;
}

static void* Read(void* unused) {
  (void)unused;
  TF_Status* status = TF_NewStatus();
  float last = 0;
  while (!stop) {
    TF_Tensor* rows = LookUp(status);
    const float* values = (const float*)TF_TensorData(rows);
    const int64_t dim = TF_Dim(rows, 1);
    float least = values[0];
    for (int64_t i = 0; i < count; ++i) {
      const float* row = values + i * dim;
      int differs = 0;
      for (int64_t k = 1; k < dim; ++k) differs |= row[k] != row[0];
      torn += differs;
      back += row[0] < last;
      if (row[0] < least) least = row[0];
    }
    last = least;
    total += count;
    TF_DeleteTensor(rows);
  }
  TF_DeleteStatus(status);
  return NULL;
}

// Sends a block; returns the number of the delta applied last, or -1.
static int64_t Send(const char* block, size_t size, TF_Status* status) {
  TF_Tensor* input = TF_AllocateTensor(TF_STRING, NULL, 0, sizeof(TF_TString));
  TF_TString* string = (TF_TString*)TF_TensorData(input);
  TF_StringInit(string);
  TF_StringCopy(string, block, size);
  TF_Tensor* result = Run(block_input, input, sequence_output, status);
  TF_StringDealloc(string);
  TF_DeleteTensor(input);
  if (TF_GetCode(status) != TF_OK) return -1;
  const int64_t sequence = *(const int64_t*)TF_TensorData(result);
  TF_DeleteTensor(result);
  return sequence;
}

static void Apply(const char* path, TF_Status* status) {
  static char* block;
  FILE* file = fopen(path, "rb");
  Require(file != NULL, "no file", path);
  char magic[8];
  Require(fread(magic, 1, 8, file) == 8 && !memcmp(magic, "TPUEMBD1", 8),
          "no delta", path);
  int64_t size = 0, sequence = -1;
  while (fread(&size, 1, 8, file) == 8) {
    block = realloc(block, size + 1);
    Require(block && fread(block, 1, size, file) == (size_t)size, "truncated",
            path);
    sequence = Send(block, size, status);
    if (sequence < 0) break;
  }
  fclose(file);
  if (sequence < 0) {
    const char* text = TF_Message(status);
    printf("refused: %.*s\n", (int)strcspn(text, "\n"), text);
  } else {
    printf("%lld\n", (long long)sequence);
  }
}

int main(int argc, char** argv) {
  Require(argc >= 8, "usage", "see the top of this file");
  TF_Status* status = TF_NewStatus();
  TF_Graph* graph = TF_NewGraph();
  session = Load(argv[1], graph, status);
  block_input = Find(graph, argv[2]);
  sequence_output = Find(graph, argv[3]);
  ids_input = Find(graph, argv[4]);
  rows_output = Find(graph, argv[5]);
  count = atoll(argv[6]);
  const int num_threads = atoi(argv[7]);
  Require(num_threads <= kMostThreads, "too many threads", argv[7]);

  // Rows have equal values from the first delta on.
  pthread_t threads[kMostThreads];
  for (int at = 8; at < argc; ++at) {
    Apply(argv[at], status);
    for (int t = 0; at == 8 && t < num_threads; ++t) {
      Require(!pthread_create(&threads[t], NULL, Read, NULL), "no thread", "");
    }
  }
  stop = 1;
  for (int t = 0; t < num_threads && argc > 8; ++t) {
    pthread_join(threads[t], NULL);
  }
  printf("%ld %ld %ld\n", (long)total, (long)torn, (long)back);
  TF_Tensor* rows = LookUp(status);
  Print(rows);

  TF_DeleteTensor(rows);
  Close(session, graph, status);
  return 0;
}
