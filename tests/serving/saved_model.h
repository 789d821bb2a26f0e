// What the programs of these tests that run a SavedModel have in common.

#ifndef TPU_EMBEDDING_TESTS_SERVING_SAVED_MODEL_H_
#define TPU_EMBEDDING_TESTS_SERVING_SAVED_MODEL_H_

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensorflow/c/c_api.h"

static void Require(int holds, const char* what, const char* detail) {
  if (holds) return;
  fprintf(stderr, "%s: %s\n", what, detail);
  exit(1);
}

static TF_Session* Load(const char* folder, TF_Graph* graph,
                        TF_Status* status) {
  const char* const tags[] = {"serve"};
  TF_SessionOptions* options = TF_NewSessionOptions();
  TF_Session* session = TF_LoadSessionFromSavedModel(
      options, NULL, folder, tags, 1, graph, NULL, status);
  Require(TF_GetCode(status) == TF_OK, "load", TF_Message(status));
  TF_DeleteSessionOptions(options);
  return session;
}

// The output of a graph that is called "name:index".
static TF_Output Find(TF_Graph* graph, const char* name_and_index) {
  char name[1024];
  const char* colon = strrchr(name_and_index, ':');
  Require(colon && colon - name_and_index < (long)sizeof(name), "no tensor",
          name_and_index);
  memcpy(name, name_and_index, colon - name_and_index);
  name[colon - name_and_index] = '\0';
  TF_Output output = {TF_GraphOperationByName(graph, name), atoi(colon + 1)};
  Require(output.oper != NULL, "no operation", name);
  return output;
}

// One value in each line.
static void Print(const TF_Tensor* tensor) {
  const float* values = (const float*)TF_TensorData(tensor);
  const int64_t size = TF_TensorElementCount(tensor);
  for (int64_t i = 0; i < size; ++i) printf("%.9g\n", values[i]);
}

static void Close(TF_Session* session, TF_Graph* graph, TF_Status* status) {
  TF_CloseSession(session, status);
  TF_DeleteSession(session, status);
  TF_DeleteGraph(graph);
  TF_DeleteStatus(status);
}

#endif  // TPU_EMBEDDING_TESTS_SERVING_SAVED_MODEL_H_
