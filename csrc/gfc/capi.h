// The C interface of the CPU collectives; gfgen/gfc/native.py mirrors it.
//
// No torch, no allocation on the way of a collective, no exceptions. Statuses are gfc::Status.
#pragma once

#include "reshard.h"

extern "C" {

typedef struct gfc_context gfc_context;

// Sizes of Plan, Descriptor, Record, Task, Part and Block: a library built from other sources than
// its caller shows by them.
void gfc_struct_bytes(uint64_t* bytes);

uint64_t gfc_arena_bytes(const gfc::Plan* plan);
uint64_t gfc_plan_hash(const gfc::Plan* plan);

// Maps a memfd of at least `bytes`; null on failure, with errno set.
char* gfc_arena_map(int fd, uint64_t bytes);
void gfc_arena_unmap(char* base, uint64_t bytes);
void gfc_arena_format(char* base, const gfc::Plan* plan, int rank, uint32_t incarnation);
int gfc_arena_check(const char* base, const gfc::Plan* plan, int rank, uint32_t incarnation);
void gfc_arena_abort_through(char* base, uint64_t dispatch);
void gfc_arena_last_failure(const char* base, gfc::Record* record);

// A rank's view of all arenas. One thread runs tasks. Others may send and receive, each pair of
// ranks and direction from one thread at a time; anyone may abort.
gfc_context* gfc_context_create(const gfc::Plan* plan, int rank);
void gfc_context_destroy(gfc_context* context);
// Says where a rank's arena is mapped; again for a new incarnation, whose edge starts anew.
void gfc_context_map(gfc_context* context, int rank, uint32_t incarnation, char* base);
void gfc_context_restart_edge(gfc_context* context, int peer);

void gfc_task_begin(gfc::Task* task, const gfc::Descriptor* group, uint64_t timeout_ns);
int gfc_enter(gfc_context* context, gfc::Task* task);
int gfc_exchange(gfc_context* context, gfc::Task* task, uint32_t kind, const gfc::Part* parts,
                 int num_parts);

// `label` tells transfers of one dispatch on one edge apart. timeout_ns 0 waits until an abort.
int gfc_send(gfc_context* context, int peer, uint64_t dispatch, uint32_t label,
             const gfc::Block* block, uint64_t timeout_ns, gfc::Record* failure);
int gfc_recv(gfc_context* context, int peer, uint64_t dispatch, uint32_t label,
             const gfc::Block* block, uint64_t timeout_ns, gfc::Record* failure);

}  // extern "C"
