// backend/comm/table.h - what the ranks of one host are doing, in memory that all of them can read.
//
// Every collective enters and leaves here, whatever carries its data. The table needs no message,
// so a rank that is stopped, stuck or elsewhere can still be seen by the others: train/watchdog.c
// reads it from a thread of its own. It is also where the ranks of a host wait for each other,
// asleep, so that more ranks than cores do not burn the time of those which still work.
#ifndef BACKEND_COMM_TABLE_H
#define BACKEND_COMM_TABLE_H

#include "backend/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { COMM_NO_UNIT = -1, TABLE_HISTORY = 64 };

// One collective as one rank entered it.
typedef struct {
    long seq;
    int op; // CommOp
    int unit;
    long step;
    int micro;
    size_t elems;
} CommEntry;

typedef struct {
    int rank; // of all ranks
    int pid;
    // Written by the rank itself, read by the others at any moment.
    long seq;                         // collectives entered
    int inside;                       // in the collective `seq` now
    double entered;                   // seconds (now_seconds, one clock per host)
    double ticked;                    // last sign of progress outside collectives
    char activity[96];                // what it does there: "saving step 20", or ""
    uint64_t hash;                    // of all entries so far
    CommEntry history[TABLE_HISTORY]; // entry seq at seq % TABLE_HISTORY
    // What it brought to a rendezvous; two, since it may be at the next while others still read.
    struct {
        long seq;
        uint64_t hash;
    } brought[2];
} CommRecord;

struct CommTable {
    int num_records;      // ranks of this host that share the table
    bool is_shared;       // false: memory of this process
    int arrived;          // at the present rendezvous
    uint32_t generation;  // rendezvous done; futex
    int reported;         // somebody has printed what is wrong
    CommRecord records[]; // (num_records) by local rank
};

size_t table_bytes(int local_size);
CommTable* table_create_private(void); // of one rank
void table_init(CommTable* table, int local_size, bool is_shared);

static inline CommRecord* table_record(Comm* comm) { // this rank's
    return &comm->table->records[comm->table->is_shared ? comm->local_rank : 0];
}

// ---- around every collective --------------------------------------------------------------------

// Announces a collective; commits ZERO_FAULT. False: this rank is to leave it out.
bool comm_enter(Comm* comm, CommOp op, int unit, size_t elems);
// Counts what this rank sent (elements of device memory; 0 for small messages) and the time.
void comm_leave(Comm* comm, CommOp op, size_t sent_elems, size_t element_bytes);

// Waits for all ranks of the host and compares what they have entered so far; a difference ends the
// run and names the rank.
void table_rendezvous(Comm* comm);

// Compares the last entries of ranks 0 .. count - 1, as messages brought them (across hosts); a
// difference ends the run and names the rank.
void table_compare_entries(CommTable* table, const CommEntry* entries, int count);

// acc (elems) (+)= the ranks' sources, in rank order, in as many calls as fold() needs. The own
// source may be acc, as fold() allows; one that comes after the first call, which writes acc, is
// copied to `spare` (elems) before. For the transports.
void comm_fold(const Comm* comm, void* acc, DType acc_dtype, bool accumulate, const void** sources,
               DType dtype, size_t elems, void* spare);

// "seq 37 reduce_scatter(block 1) step 3 micro 0"
const char* comm_entry_text(const CommEntry* entry, char* text, size_t size);

// True for the first rank of this host that asks: it prints what ends the run. The others wait a
// moment, so that its line is out before the launcher ends everybody.
bool table_may_report(CommTable* table);

// Prints one line if table_may_report. Ends this process with EXIT_COMM.
NO_RETURN void table_fail(CommTable* table, const char* fmt, ...) PRINTF_LIKE(2, 3);

#ifdef __cplusplus
}
#endif
#endif
