// block.h - the state of the one block that runs; shared by block.cpp, grid.cpp and report.cpp.
#ifndef EMU_BLOCK_H
#define EMU_BLOCK_H

#include "emu.h"
#include "fiber.h"
#include "sanitizer.h"
#include "settings.h"

#include <random>
#include <vector>

namespace emu {

constexpr int MAX_THREADS = 1024, MAX_WARPS = 32;

// Sets of ThreadSanitizer fibers. Alternate blocks of a stream use two sets, so that neighbouring
// blocks are not ordered by sharing threads; a few streams have a pair each for the same reason.
constexpr int STREAM_SLOTS = 3;
constexpr int NUM_SETS = IS_TSAN ? 2 * STREAM_SLOTS : 1;

enum State : uint8_t { NOT_STARTED, RUNNING, AT_BARRIER, AT_WARP_OP, EXITED };

// Lanes of one mask that meet. Two tables are used in turn, so that one meeting per operation is
// enough: nobody can deposit into a table before all have read it, an operation ago.
struct Rendezvous {
    uint32_t mask, arrived;
    int phase;
    Site site; // of the first to arrive
    alignas(16) char table[2][32 * MAX_DEPOSIT];
};

// Masks a warp may use in one block. Real kernels use one or two.
constexpr int MAX_MASKS = 8;

struct Warp {
    uint32_t exist; // lanes that the block has
    uint32_t alive; // of these, not exited
    uint32_t ready; // started, waited, and may go on
    int num_rendezvous;
    Rendezvous rendezvous[MAX_MASKS];
};

struct AsyncCopy {
    void* shared;
    const void* global;
    int valid_bytes, group;
};

struct Thread {
    uint3 index;
    int lane;
    State state;
    Warp* warp;
    Fiber* fiber;
    Site site;     // where it waits
    uint32_t mask; // of the warp operation it waits in
    std::vector<AsyncCopy> copies;
    size_t copies_done;
    int groups; // committed
    void* tsan[NUM_SETS];
};

struct Machine {
    Thread threads[MAX_THREADS];
    Warp warps[MAX_WARPS];
    int num_threads, num_warps;
    int order_of_start[MAX_THREADS];

    int num_started, num_exited;
    uint32_t ready_warps; // warps with ready lanes
    Thread* current;      // null outside kernels
    Fiber main_fiber, *current_fiber;
    Fiber* idle_fibers[NUM_SETS]; // lists
    Order order;
    std::mt19937 random;

    int num_at_barrier;
    Site barrier_site; // of the first to arrive
    int reduction_count, reduction_result[3];

    const void* kernel; // null outside kernels
    void (*body)(void*);
    void* context;
    size_t shared_bytes; // dynamic, of this launch
    char* shared;
    long switches;

    // ThreadSanitizer only; see run_block.
    int set;           // in use
    void* tsan_stream; // the fiber that launched the grid
    TsanKey grid_begin[STREAM_SLOTS], grid_end[STREAM_SLOTS];
    TsanKey set_begin[NUM_SETS], set_end[NUM_SETS];
    TsanKey barrier[NUM_SETS][2], warp_op[NUM_SETS][MAX_WARPS][MAX_MASKS][2];
    int barrier_phase;
    Fiber* used_fibers; // by threads of this block that exited; a list
};

extern Machine machine;

// Runs all threads of the block that machine describes.
void run_threads();

// Is p behind the block's dynamic shared memory, where nothing may be touched?
bool is_past_dynamic_shared(const void* p);

} // namespace emu

#endif
