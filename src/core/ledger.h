// core/ledger.h - the memory plan: one list of named allocations, and the allocator's only source.
//
// Planning adds lines (integers only, nothing is allocated); the run allocates each line once, with
// exactly the planned bytes (backend/device.h: device_alloc). What `--plan` prints is therefore
// what the run takes.
#ifndef CORE_LEDGER_H
#define CORE_LEDGER_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// The first three are the paper's model state; everything else is transient.
typedef enum { MEM_WEIGHTS, MEM_GRADS, MEM_OPTIMIZER, MEM_TRANSIENT, NUM_MEM_KINDS } MemKind;

typedef struct {
    char name[32]; // key in start.plan_bytes and in `--plan --json`
    MemKind kind;
    size_t bytes;
    void* ptr; // NULL until allocated
} LedgerLine;

enum { LEDGER_MAX_LINES = 48 };

typedef struct {
    LedgerLine lines[LEDGER_MAX_LINES];
    int num_lines;
    size_t allocated_bytes; // sum over the lines allocated so far: end.peak_bytes
} Ledger;

// Adds a line; a name used twice dies. Lines of 0 bytes are dropped: they are nothing to show.
void ledger_add(Ledger* ledger, MemKind kind, const char* name, size_t bytes);

// The line of that name, or NULL.
LedgerLine* ledger_find(Ledger* ledger, const char* name);

size_t ledger_kind_bytes(const Ledger* ledger, MemKind kind);
size_t ledger_total_bytes(const Ledger* ledger);

#ifdef __cplusplus
}
#endif
#endif
