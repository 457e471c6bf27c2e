// zero/params.c - weights: bringing a unit's full weights to the compute stream and letting go.
//
// Stages 0 to 2 have all weights; stage 3 gathers a unit into a slot. Block l goes to slot l mod k,
// unit E has its own. A slot keeps its unit after the release, until another one needs it: forward
// ends with the last k blocks at hand for backward, backward with the first k for the next
// micro-step. zero_step and zero_publish make all copies stale.
#include "zero/engine.h"

static WeightSlot* slot_of(Zero* zero, int unit) {
    const int k = zero->layout.weight_slots;
    return unit == 0 ? &zero->slots[k] : &zero->slots[(unit - 1) % k];
}

static void gather_into(Zero* zero, WeightSlot* slot, int unit) {
    const Unit* at = zero_unit(zero, unit);
    event_wait(slot->free, STREAM_COMM);
    event_wait(zero->updated[unit], STREAM_COMM);
    zero_poison(slot->ptr, at->padded_elems * sizeof(floatX), STREAM_COMM);
    zero->comm->all_gather(zero->comm, slot->ptr, own_weights(zero, unit), at->shard_elems,
                           FLOATX_DTYPE, unit);
    event_record(slot->ready, STREAM_COMM);
    slot->unit = unit;
}

// Waits, by polling, until the compute stream has come to where it stood PACE gathers ago.
static void keep_pace(Zero* zero) {
    event_t event = zero->pace[zero->gathers++ % PACE];
    event_synchronize(event);
    event_record(event, STREAM_COMPUTE);
}

const floatX* zero_gather(Zero* zero, int unit) {
    keep_pace(zero);
    if (!zero->layout.weights_sharded) {
        event_wait(zero->published[unit], STREAM_COMPUTE);
        return zero->weights + zero_unit(zero, unit)->full_offset;
    }
    WeightSlot* slot = slot_of(zero, unit);
    CHECK(!slot->is_held, "unit %d is gathered while unit %d has not been released", unit,
          slot->unit);
    if (slot->unit != unit) gather_into(zero, slot, unit);
    event_wait(slot->ready, STREAM_COMPUTE);
    slot->is_held = true;
    return slot->ptr;
}

void zero_prefetch(Zero* zero, int unit) {
#ifdef HOSTILE
    (void)zero;
    (void)unit;
#else
    if (unit < 0 || !zero->layout.weights_sharded) return;
    WeightSlot* slot = slot_of(zero, unit);
    if (!slot->is_held && slot->unit != unit) gather_into(zero, slot, unit);
#endif
}

void zero_release(Zero* zero, int unit) {
    if (!zero->layout.weights_sharded) return;
    WeightSlot* slot = slot_of(zero, unit);
    CHECK(slot->is_held && slot->unit == unit, "unit %d is released but not held", unit);
    slot->is_held = false;
    event_record(slot->free, STREAM_COMPUTE);
}

void zero_drop_slots(Zero* zero) {
    if (!zero->layout.weights_sharded) return;
    for (int i = 0; i <= zero->layout.weight_slots; i++) {
        WeightSlot* slot = &zero->slots[i];
        CHECK(!slot->is_held, "weights change while unit %d is held", slot->unit);
        if (slot->unit == NO_UNIT) continue;
        event_wait(slot->ready, STREAM_COMPUTE);
        zero_poison(slot->ptr, zero_unit(zero, slot->unit)->padded_elems * sizeof(floatX),
                    STREAM_COMPUTE);
        event_record(slot->free, STREAM_COMPUTE);
        slot->unit = NO_UNIT;
    }
}

void zero_gather_updated(Zero* zero) {
    Comm* comm = zero->comm;
    if (!zero->layout.optimizer_sharded) return; // every rank has updated everything
    comm->expose(comm);
    if (zero->layout.weights_sharded) {
        zero_drop_slots(zero);
        return;
    }
    for (int u = 0; u < zero->partition.num_units; u++) {
        const Unit* at = zero_unit(zero, u);
        event_wait(zero->updated[u], STREAM_COMM);
        comm->all_gather(comm, zero->weights + at->full_offset, own_weights(zero, u),
                         at->shard_elems, FLOATX_DTYPE, u);
        event_record(zero->published[u], STREAM_COMM);
    }
}
