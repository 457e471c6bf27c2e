// zero/engine.h - the state of the engine, shared by the files of zero/ and by nobody else.
//
// Two streams. Every edge between them is one event, named here once:
//
//   ready[slot]     comm -> compute  gathered weights are there        before a unit is used
//   free[slot]      compute -> comm  the unit's user is done           before the slot is refilled
//   gready[slot]    compute -> comm  a gradient is written             before it is reduced
//   gfree[slot]     comm -> compute  it has been reduced               before the slot is rewritten
//   written         compute -> comm  a gradient is in the accumulators before they are reduced
//   reduced         comm -> compute  the last reduction is done        before norm and AdamW read
//   updated[unit]   compute -> comm  AdamW has written this shard      before it is gathered
//   published[unit] comm -> compute  full weights are new everywhere   before anybody reads them
//
// pace[i] is the host's: it runs at most PACE units ahead of the compute stream, because a launch
// into a full queue blocks inside the CUDA runtime, where a collective that stalls goes unseen.
//
// The next step's first reduction writes the accumulators (it assigns, nothing is zeroed) after
// gready of its own slot, which the compute stream records after AdamW has read them.
#ifndef ZERO_ENGINE_H
#define ZERO_ENGINE_H

#include "zero/partition.h"
#include "zero/zero.h"

#ifdef HOSTILE // one of each slot, at the least alignment that the table promises
enum { WEIGHT_SLOTS = 1, GRAD_SLOTS = 1, SLOT_SKEW = PARAM_ALIGN };
#else
enum { WEIGHT_SLOTS = 2, GRAD_SLOTS = 2, SLOT_SKEW = 0 };
#endif
enum { NO_UNIT = -1 };
enum { PACE = 16 }; // units, of at most about 30 launches each; the queue takes 1024

// What follows from the configuration: sizes of the plan's lines, and which way gradients take.
typedef struct {
    bool weights_sharded, grads_sharded, optimizer_sharded;
    bool has_master;       // masters apart from the weights: floatX is not fp32
    bool local_sum;        // gradients are summed over micro-steps before they are reduced
    bool direct_blocks;    // blocks' gradients are written into the accumulators, no slot
    bool direct_embedding; // the same for unit E
    DType accum_dtype;     // what the accumulators hold
    int weight_slots, grad_slots;
    size_t weight_elems, grad_elems, optimizer_elems; // of the three kinds of state
    size_t optimizer_bytes;                           // m, v and the master
    size_t slot_elems;                                // of one slot: the largest block
    size_t partials;                                  // norm blocks of one rank's shards
    size_t message_bytes, own_message_bytes;          // sent by each rank; kept by it
} Layout;

// A rank's part of the step's message, followed by doubles: the sums of losses of its micro-steps,
// then its norm partials (sent in exact mode only).
typedef struct {
    int32_t signal;
    int32_t bad_tensor; // the first of this rank's tensors with non-finite elements, or -1
    int32_t bad_source; // the rank whose gradient brought them here, or -1
    uint64_t bad_count;
    double sum_squares; // of this rank's shards
} MessageHead;

Layout layout_of(const ZeroConfig* config, const Partition* partition);

// A buffer for one unit's full weights.
typedef struct {
    floatX* ptr;
    int unit;     // whose weights it holds, or NO_UNIT
    bool is_held; // between gather and release
    event_t ready, free;
} WeightSlot;

// A buffer for one unit's gradient of one micro-batch, until it is reduced.
typedef struct {
    void* ptr;
    long seq; // the collective that reads it; settled before the slot is written again
    event_t gready, gfree;
} GradSlot;

struct Zero {
    ZeroConfig config;
    const ParamTable* table;
    Comm* comm;
    Partition partition;
    Layout layout;

    floatX* weights;       // full or shard layout
    void* grads;           // accumulators, config.accum_dtype, full or shard layout
    float *master, *m, *v; // full or shard layout; master is `weights` in the fp32 build
    WeightSlot* slots;     // (weight_slots + 1) of blocks, then E; stage 3
    GradSlot* grad_slots;  // (grad_slots + 1) of blocks, then E
    double* partials;      // (layout.partials) device: of shard element i, block i / NORM_BLOCK
    int bad_source;        // rank that has brought a non-finite gradient in this step, or -1
    char* message;         // (world_size * message_bytes) host
    char* own_message;     // (own_message_bytes) host
    event_t *updated, *published; // (num_units)
    event_t written, reduced;
    event_t* pace; // (PACE) where gather i found the compute stream is pace[i % PACE]
    long gathers;  // so far

    long step;
    int micro;
    bool embedding_grad_open, block_grad_open; // between zero_grad_begin and zero_grad_end
    bool is_counting;                          // inside a step
    size_t elements_before, bytes_before;      // the transport's counters when the step began
    size_t elements_counted, bytes_counted;    // since zero_take_counters
    float* host_chunk; // (HOST_CHUNK) staging of initialisation, files and hash
};

enum { HOST_CHUNK = 1 << 18 }; // elements

// ---- places -------------------------------------------------------------------------------------

static inline Unit* zero_unit(const Zero* zero, int unit) { return &zero->partition.units[unit]; }

// First element of this rank's shard of a unit, in a buffer of that layout.
static inline size_t shard_start(const Zero* zero, int unit, bool is_sharded) {
    const Unit* at = zero_unit(zero, unit);
    return is_sharded ? at->shard_offset
                      : at->full_offset + (size_t)zero->partition.rank * at->shard_elems;
}
static inline floatX* own_weights(const Zero* zero, int unit) {
    return zero->weights + shard_start(zero, unit, zero->layout.weights_sharded);
}
static inline char* grad_address(const Zero* zero, size_t element) {
    return (char*)zero->grads + element * dtype_bytes(zero->config.accum_dtype);
}
static inline void* own_grads(const Zero* zero, int unit) {
    return grad_address(zero, shard_start(zero, unit, zero->layout.grads_sharded));
}

// What this rank updates of a unit: its shard, or all of it at stage 0.
static inline const SegmentList* updated_segments(const Zero* zero, int unit) {
    const Unit* at = zero_unit(zero, unit);
    return zero->layout.optimizer_sharded ? &at->owned : &at->all;
}
static inline size_t optimizer_start(const Zero* zero, int unit) {
    const Unit* at = zero_unit(zero, unit);
    return zero->layout.optimizer_sharded ? at->shard_offset : at->full_offset;
}
static inline floatX* updated_weights(const Zero* zero, int unit) {
    return zero->layout.optimizer_sharded ? own_weights(zero, unit)
                                          : zero->weights + zero_unit(zero, unit)->full_offset;
}

// Fills a buffer that holds nothing of value with NaN under ZERO_DEBUG=poison.
void zero_poison(void* ptr, size_t bytes, stream_t stream);

// After this rank's shards of the weights have changed (event updated[unit]): makes the full
// weights of all ranks new again. Stage 3 only forgets its copies.
void zero_gather_updated(Zero* zero);
// Collects what was sent between the first micro-step and the end of the update.
void zero_end_step(Zero* zero);

#endif
