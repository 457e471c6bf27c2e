// zero/gradients.c - gradients: where a unit's go in a micro-step, and how they reach their owner.
//
// Three ways, chosen once (layout_of in plan.c):
//   direct  the kernels write or add into the accumulators; reduced once, after the last micro-step
//   local   a slot of floatX, added to the full accumulators; reduced once
//   slot    a slot of floatX, reduced in every micro-step into the owner's accumulators
// In exact mode the owner adds micro-batches in the order micro * world_size + rank, one rounding
// to the accumulator's type each: the same bits for every stage and number of ranks.
//
// A unit's slot is written by kernels that assign; unit E's is fp32, because the head's chunks and
// the embedding add to it, and is rounded to floatX once. After the last micro-step stage 0 gathers
// the accumulators, since every rank updates everything.
#include <math.h>

#include "core/fault.h"
#include "zero/engine.h"

static GradSlot* slot_of(Zero* zero, int unit) {
    const int k = zero->layout.grad_slots;
    return unit == 0 ? &zero->grad_slots[k] : &zero->grad_slots[(unit - 1) % k];
}

static bool is_last(const Zero* zero) { return zero->micro == zero->config.grad_accum_steps - 1; }

static bool is_direct(const Zero* zero, int unit) {
    return unit == 0 ? zero->layout.direct_embedding : zero->layout.direct_blocks;
}

// Where the unit's gradient is written in this micro-step.
static Grad grad_place(Zero* zero, int unit) {
    if (!is_direct(zero, unit)) {
        return (Grad){slot_of(zero, unit)->ptr, unit == 0 || FLOATX_DTYPE == DTYPE_FP32, false};
    }
    // Shards are whole units wherever sharded accumulators are written directly (one rank).
    void* grads = zero->layout.grads_sharded
                      ? own_grads(zero, unit)
                      : grad_address(zero, zero_unit(zero, unit)->full_offset);
    return (Grad){grads, zero->config.accum_dtype == DTYPE_FP32, zero->micro > 0};
}

Grad zero_grad_begin(Zero* zero, int unit) {
    bool* is_open = unit == 0 ? &zero->embedding_grad_open : &zero->block_grad_open;
    CHECK(!*is_open, "the gradient of unit %d is begun before another has ended", unit);
    *is_open = true;
    const Grad grad = grad_place(zero, unit);
    if (!is_direct(zero, unit)) {
        GradSlot* slot = slot_of(zero, unit);
        event_wait(slot->gfree, STREAM_COMPUTE);
        zero->comm->settle(zero->comm, slot->seq);
    }
    if (!grad.accumulate) {
        zero_poison(grad.ptr,
                    zero_unit(zero, unit)->padded_elems *
                        (grad.is_fp32 ? sizeof(float) : sizeof(floatX)),
                    STREAM_COMPUTE);
    }
    return grad;
}

// ZERO_FAULT=nan: in the last micro-step, into the first element of the named tensor (or the first
// of the table).
static void inject_nan(Zero* zero, int unit, Grad grad) {
    const char* name = fault_tensor();
    const int tensor = name[0] ? param_find(zero->table, name) : 0;
    if (tensor < 0 || zero->table->tensors[tensor].unit != unit || !is_last(zero) ||
        !fault_now(FAULT_NAN, zero->step, -1)) {
        return;
    }
    grad = grad_at(grad, zero->table->tensors[tensor].unit_offset);
    const uint32_t all_ones = 0xFFFFFFFFu; // NaN in every type
    device_upload(grad.ptr, &all_ones, grad.is_fp32 ? sizeof(float) : sizeof(floatX));
}

// The slot's floatX gradient to its owner, or into this rank's full accumulators.
static void reduce_slot(Zero* zero, int unit, GradSlot* slot) {
    const Unit* at = zero_unit(zero, unit);
    Comm* comm = zero->comm;
    const DType acc_dtype = zero->config.accum_dtype;
    event_record(slot->gready, STREAM_COMPUTE);
    event_wait(slot->gready, STREAM_COMM);
    if (unit == 0) {
        convert(slot->ptr, FLOATX_DTYPE, slot->ptr, DTYPE_FP32, at->padded_elems, STREAM_COMM);
    }
    if (zero->layout.local_sum) {
        const void* source = slot->ptr;
        fold(grad_address(zero, at->full_offset), acc_dtype, zero->micro > 0, &source, FLOATX_DTYPE,
             1, at->padded_elems, STREAM_COMM);
    } else {
        comm->expose(comm);
        comm->reduce_scatter(comm, own_grads(zero, unit), acc_dtype, zero->micro > 0, slot->ptr,
                             at->shard_elems, FLOATX_DTYPE, zero->config.exact, unit);
        slot->seq = comm->seq;
    }
    event_record(slot->gfree, STREAM_COMM);
}

// The full accumulators' shards to their owners, in place.
static void reduce_accumulators(Zero* zero, int unit) {
    const Unit* at = zero_unit(zero, unit);
    Comm* comm = zero->comm;
    if (is_direct(zero, unit)) {
        event_record(zero->written, STREAM_COMPUTE);
        event_wait(zero->written, STREAM_COMM);
    }
    comm->expose(comm);
    comm->reduce_scatter(comm, own_grads(zero, unit), zero->config.accum_dtype, false,
                         grad_address(zero, at->full_offset), at->shard_elems,
                         zero->config.accum_dtype, zero->config.exact, unit);
}

// Looks for the rank that has brought a non-finite gradient, while all ranks' gradients of the
// micro-step are still in place. `reduced` is the unit's gradient as it was reduced.
static int find_bad_source(Zero* zero, int unit, const void* reduced, DType dtype) {
    const Unit* at = zero_unit(zero, unit);
    Comm* comm = zero->comm;
    const char* slice =
        (const char*)reduced + (size_t)comm->rank * at->shard_elems * dtype_bytes(dtype);
    // This rank's own comes last: where it was reduced in place, the sum has taken its place.
    for (int i = 1; i <= comm->world_size; i++) {
        const int rank = (comm->rank + i) % comm->world_size;
        const void* view = comm->peer_view(comm, slice, rank);
        size_t count = 0;
        if (view) find_nonfinite(view, dtype, at->owned.segments, at->owned.count, &count);
        if (count) return rank;
    }
    return -1;
}

// The squares of this rank's shard, for the norm.
static void square_shard(Zero* zero, int unit) {
    const Unit* at = zero_unit(zero, unit);
    double* partials = zero->partials + at->shard_offset / NORM_BLOCK;
    norm_partials(partials, own_grads(zero, unit), zero->config.accum_dtype, at->shard_elems,
                  at->owned.segments, at->owned.count, STREAM_COMM);
    if (!device_is_host() || zero->bad_source >= 0)
        return; // elsewhere it would wait for the device
    double sum = 0;
    for (size_t i = 0; i < at->shard_elems / NORM_BLOCK; i++) sum += partials[i];
    if (isfinite(sum)) return;
    const bool in_place = is_direct(zero, unit) || zero->layout.local_sum;
    zero->bad_source = in_place
                           ? find_bad_source(zero, unit, grad_address(zero, at->full_offset),
                                             zero->config.accum_dtype)
                           : find_bad_source(zero, unit, slot_of(zero, unit)->ptr, FLOATX_DTYPE);
}

void zero_grad_end(Zero* zero, int unit) {
    bool* is_open = unit == 0 ? &zero->embedding_grad_open : &zero->block_grad_open;
    CHECK(*is_open, "the gradient of unit %d is ended but was not begun", unit);
    *is_open = false;
    inject_nan(zero, unit, grad_place(zero, unit));
    if (!is_direct(zero, unit)) reduce_slot(zero, unit, slot_of(zero, unit));
    if (!is_last(zero)) return;
    if (is_direct(zero, unit) || zero->layout.local_sum) reduce_accumulators(zero, unit);
    square_shard(zero, unit);
    if (!zero->layout.optimizer_sharded) {
        Comm* comm = zero->comm;
        const Unit* at = zero_unit(zero, unit);
        comm->expose(comm);
        comm->all_gather(comm, grad_address(zero, at->full_offset), own_grads(zero, unit),
                         at->shard_elems, zero->config.accum_dtype, unit);
    }
    event_record(zero->reduced, STREAM_COMM); // the last unit's stands for all
}
