// Calls a kernel's handler as XLA does, on operands from a file, and writes its results to another.
// Both files hold numbers as they lie in memory; `emulation.py` writes the one and reads the other.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "xla/ffi/api/c_api.h"

enum { MAX_BUFFERS = 64, MAX_TASKS = 64, NUM_THREADS = 3 };

XLA_FFI_Error* kernel(XLA_FFI_CallFrame* frame);

static pthread_t threads[MAX_TASKS];
static int num_tasks;

static void* run_task(void* given) {
  XLA_FFI_ThreadPool_Schedule_Args* args = given;
  args->task(args->data);
  free(args);
  return NULL;
}

static XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  XLA_FFI_ThreadPool_Schedule_Args* copy = malloc(sizeof *copy);
  *copy = *args;
  if (num_tasks == MAX_TASKS || pthread_create(&threads[num_tasks++], NULL, run_task, copy)) abort();
  return NULL;
}

static XLA_FFI_Error* count_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = NUM_THREADS;
  return NULL;
}

static int64_t read_number(FILE* file) {
  int64_t number;
  if (fread(&number, sizeof number, 1, file) != 1) abort();
  return number;
}

// Reads rank, dimensions and size in bytes of a buffer, and makes it.
static int64_t read_buffer(FILE* file, XLA_FFI_Buffer* buffer) {
  buffer->struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  buffer->rank = read_number(file);
  buffer->dims = calloc(buffer->rank + 1, sizeof(int64_t));
  for (int64_t axis = 0; axis < buffer->rank; axis++) buffer->dims[axis] = read_number(file);
  int64_t size = read_number(file);
  buffer->data = aligned_alloc(64, (size + 127) / 64 * 64);
  return size;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  static XLA_FFI_Buffer args[MAX_BUFFERS], rets[MAX_BUFFERS];
  static void *arg_places[MAX_BUFFERS], *ret_places[MAX_BUFFERS];
  static int64_t sizes[MAX_BUFFERS];
  FILE* file = fopen(argv[1], "rb");
  if (!file) return 3;
  int64_t num_args = read_number(file), num_rets = read_number(file);
  for (int64_t i = 0; i < num_args; i++) {
    int64_t size = read_buffer(file, &args[i]);
    if (fread(args[i].data, 1, size, file) != (size_t)size) return 4;
    arg_places[i] = &args[i];
  }
  for (int64_t i = 0; i < num_rets; i++) {
    int64_t shared = read_number(file);  // the argument whose memory it has, or -1
    sizes[i] = read_buffer(file, &rets[i]);
    if (shared >= 0) rets[i].data = args[shared].data;
    ret_places[i] = &rets[i];
  }
  fclose(file);

  XLA_FFI_Api api = {
      .struct_size = XLA_FFI_Api_STRUCT_SIZE,
      .XLA_FFI_ThreadPool_Schedule = schedule,
      .XLA_FFI_ThreadPool_NumThreads = count_threads,
  };
  XLA_FFI_CallFrame frame = {
      .struct_size = XLA_FFI_CallFrame_STRUCT_SIZE,
      .api = &api,
      .stage = XLA_FFI_ExecutionStage_EXECUTE,
      .args = {.struct_size = XLA_FFI_Args_STRUCT_SIZE, .size = num_args, .args = arg_places},
      .rets = {.struct_size = XLA_FFI_Rets_STRUCT_SIZE, .size = num_rets, .rets = ret_places},
  };
  if (kernel(&frame)) return 5;
  for (int i = 0; i < num_tasks; i++) pthread_join(threads[i], NULL);

  file = fopen(argv[2], "wb");
  if (!file) return 6;
  for (int64_t i = 0; i < num_rets; i++)
    if (fwrite(rets[i].data, 1, sizes[i], file) != (size_t)sizes[i]) return 7;
  return fclose(file) ? 8 : 0;
}
