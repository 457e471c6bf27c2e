// train/checkpoint.h - saving and resuming a run: OUT/step_%08d/, OUT/latest, OUT/DONE_%08d.
//
// A checkpoint is a Hugging Face model directory plus optimizer.safetensors and state.json. Only
// rank 0 touches files; state comes to it, and goes from it, in pieces of at most ZERO_IO_ELEMS
// elements through zero_read and zero_write, so that no rank holds more than its share and one
// piece.
//
// The invariant: at every moment, also under kill -9, each OUT/step_* is complete or can be told
// from a complete one by sizes and checksums, and the previous one is untouched until the new one
// is on disk. Writing: temporary directory, crc32 on the way, fsync, rename, fsync of the parent,
// `latest`.
//
// All functions that take a Comm are collective and return the same on all ranks.
#ifndef TRAIN_CHECKPOINT_H
#define TRAIN_CHECKPOINT_H

#include <limits.h>
#include "backend/comm.h"
#include "core/ledger.h"
#include "core/params.h"
#include "train/state.h"
#include "zero/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char* out;     // OUT
    int keep;            // -nk: newest checkpoints to keep, 0 = all
    int milestone_every; // -nm: never delete multiples of it, 0 = none
    Comm* comm;
    const ParamTable* table;
    float* buffer; // (buffer_elems) host memory, rank 0 only, else NULL
    size_t buffer_elems;
    long loaded;   // the step this run goes on from, 0: none
    long* written; // (num_written) the steps it has written, on rank 0
    int num_written;
    bool lacks_latest; // the last save could not replace OUT/latest, and said so
} Checkpoints;

// Elements of the one buffer that saving and loading stream through.
size_t checkpoint_buffer_elems(const ParamTable* table);
// Adds "save_buffer" to rank 0's plan; checkpoint_init takes it. Host memory on both backends.
void checkpoint_plan(Ledger* ledger, const ParamTable* table, int rank);
void checkpoint_init(Checkpoints* checkpoints, const Options* options, const ParamTable* table,
                     Comm* comm, Ledger* ledger);
void checkpoint_free(Checkpoints* checkpoints);

// Before a run writes into OUT, its -o: makes it, tries that it can be written, locks it against
// other runs, removes temporary directories of killed saves; --dry-run checks the same and changes
// nothing. A new run into an OUT with step_* is an error unless it is to --overwrite them, which
// checkpoint_start_anew does.
bool checkpoint_open_out(const Options* options, Comm* comm, Error* error);

// Removes latest and DONE_* of an earlier run, and with `overwrite` every step_*. For a run that
// starts from scratch, once nothing can be wrong with its options and data any more.
void checkpoint_start_anew(const Checkpoints* checkpoints, bool overwrite);

// The newest valid checkpoint of OUT: sizes and checksums verified, state read; a warning for each
// newer one passed over, with the reason. *found = false: there is none, no error.
bool checkpoint_find(const char* out, CheckpointState* state, char dir[PATH_MAX], bool* found,
                     Comm* comm, Error* error);

typedef struct {
    char name[32]; // "step_00000010"
    size_t bytes;  // written or read
    double ms;
} CheckpointReport;

// Masters, m and v from that directory onto all ranks, then zero_publish.
bool checkpoint_load(Checkpoints* checkpoints, const char* dir, Zero* zero,
                     CheckpointReport* report, Error* error);

// Writes OUT/step_%08d for state->step and deletes what -nk no longer keeps; damaged checkpoints do
// not count. False: `error` (code 4) says why, the temporary directory is gone, earlier checkpoints
// are untouched; a run goes on. report->bytes: on rank 0.
bool checkpoint_save(Checkpoints* checkpoints, const CheckpointState* state, Zero* zero,
                     CheckpointReport* report, Error* error);

// Does OUT/step_%08d exist, and was it not passed over as damaged?
bool checkpoint_exists(const Checkpoints* checkpoints, long step);

// Writes the empty marker OUT/DONE_%08d.
bool checkpoint_mark_done(const char* out, long step, Comm* comm, Error* error);

#ifdef __cplusplus
}
#endif
#endif
