// zero/zero.c - taking and giving back what the engine holds. See zero.h.
#include "zero/zero.h"

#include <stdlib.h>
#include <string.h>

#include "core/fault.h"
#include "zero/engine.h"

static event_t* create_events(int count) {
    event_t* events = checked_calloc((size_t)count, sizeof(event_t));
    for (int i = 0; i < count; i++) events[i] = event_create();
    return events;
}

static void destroy_events(event_t* events, int count) {
    for (int i = 0; i < count; i++) event_destroy(events[i]);
    free(events);
}

// Slot i of a line that holds several, each of `elems` elements.
static void* slot_address(void* base, int i, size_t elems, size_t element_bytes) {
    return (char*)base + ((size_t)i * (elems + SLOT_SKEW) + SLOT_SKEW) * element_bytes;
}

static void create_weight_slots(Zero* zero, Ledger* ledger) {
    const Layout* layout = &zero->layout;
    void* blocks = device_alloc(ledger, "weight_slots");
    void* embedding = device_alloc(ledger, "embedding_weights");
    zero->slots = checked_calloc((size_t)layout->weight_slots + 1, sizeof(WeightSlot));
    for (int i = 0; i <= layout->weight_slots; i++) {
        WeightSlot* slot = &zero->slots[i];
        slot->ptr = i < layout->weight_slots
                        ? slot_address(blocks, i, layout->slot_elems, sizeof(floatX))
                        : slot_address(embedding, 0, 0, sizeof(floatX));
        slot->unit = NO_UNIT;
        slot->ready = event_create();
        slot->free = event_create();
    }
}

static void create_grad_slots(Zero* zero, Ledger* ledger) {
    const Layout* layout = &zero->layout;
    Comm* comm = zero->comm;
    void* blocks = comm->alloc(comm, ledger, "grad_slots", COMM_EXPOSED);
    void* embedding = comm->alloc(comm, ledger, "embedding_grad", COMM_EXPOSED);
    zero->grad_slots = checked_calloc((size_t)layout->grad_slots + 1, sizeof(GradSlot));
    for (int i = 0; i <= layout->grad_slots; i++) {
        GradSlot* slot = &zero->grad_slots[i];
        if (i < layout->grad_slots) {
            slot->ptr = slot_address(blocks, i, layout->slot_elems, sizeof(floatX));
        } else if (embedding) {
            slot->ptr = slot_address(embedding, 0, 0, sizeof(float));
        }
        slot->gready = event_create();
        slot->gfree = event_create();
    }
}

Zero* zero_create(const ZeroConfig* config, const ParamTable* table, Comm* comm, Ledger* ledger) {
    CHECK(config->stage >= 0 && config->stage <= 3, "stage %d", config->stage);
    CHECK(config->world_size == comm->world_size && config->rank == comm->rank,
          "planned for rank %d of %d, running as rank %d of %d", config->rank, config->world_size,
          comm->rank, comm->world_size);
    Zero* zero = checked_calloc(1, sizeof(Zero));
    zero->config = *config;
    zero->table = table;
    zero->comm = comm;
    partition_init(&zero->partition, table, config->world_size, config->rank);
    zero->layout = layout_of(config, &zero->partition);
    zero->host_chunk = checked_malloc(HOST_CHUNK * sizeof(float));
    const Layout* layout = &zero->layout;

    // At stages 1 and 2 each rank writes its own shards of the weights only, so the ranks of a host
    // can share one array.
    const bool one_copy = layout->optimizer_sharded && !layout->weights_sharded;
    zero->weights = layout->optimizer_sharded ? comm->alloc(comm, ledger, "weights",
                                                            one_copy ? COMM_ONE_COPY : COMM_EXPOSED)
                                              : device_alloc(ledger, "weights");
    // Padding of weights and masters is zero for ever; that of gradients is never read. Of one copy
    // each rank clears its own part: another rank may already have written its weights.
    if (one_copy) {
        for (int u = 0; u < zero->partition.num_units; u++)
            device_fill(own_weights(zero, u), 0, zero_unit(zero, u)->shard_elems * sizeof(floatX),
                        STREAM_COMPUTE);
    } else {
        device_fill(zero->weights, 0, layout->weight_elems * sizeof(floatX), STREAM_COMPUTE);
    }
    create_weight_slots(zero, ledger);
    comm->alloc(comm, ledger, "exchange", COMM_STAGING);
    const int units = zero->partition.num_units;
    zero->updated = create_events(units);
    zero->published = create_events(units);
    zero->pace = create_events(PACE);
    if (!config->training) return zero;

    zero->config.accum_dtype = layout->accum_dtype;
    zero->grads = comm->alloc(comm, ledger, "grads", COMM_EXPOSED);
    float* optimizer = device_alloc(ledger, "optimizer");
    device_fill(optimizer, 0, layout->optimizer_bytes, STREAM_COMPUTE);
    zero->m = optimizer;
    zero->v = optimizer + layout->optimizer_elems;
    zero->master = layout->has_master ? optimizer + 2 * layout->optimizer_elems : NULL;
    create_grad_slots(zero, ledger);
    zero->written = event_create();
    zero->reduced = event_create();
    zero->partials = device_alloc(ledger, "norm_partials");
    zero->message = comm->alloc(comm, ledger, "step_message", COMM_STAGING);
    zero->own_message = zero->message + (size_t)config->world_size * layout->message_bytes;
    return zero;
}

void zero_destroy(Zero* zero) {
    const int units = zero->partition.num_units;
    for (int i = 0; i <= zero->layout.weight_slots; i++) {
        event_destroy(zero->slots[i].ready);
        event_destroy(zero->slots[i].free);
    }
    free(zero->slots);
    if (zero->config.training) {
        for (int i = 0; i <= zero->layout.grad_slots; i++) {
            event_destroy(zero->grad_slots[i].gready);
            event_destroy(zero->grad_slots[i].gfree);
        }
        free(zero->grad_slots);
        event_destroy(zero->written);
        event_destroy(zero->reduced);
    }
    destroy_events(zero->updated, units);
    destroy_events(zero->published, units);
    destroy_events(zero->pace, PACE);
    zero->comm->free_memory(zero->comm);
    free(zero->host_chunk);
    partition_free(&zero->partition);
    free(zero);
}

void zero_poison(void* ptr, size_t bytes, stream_t stream) {
    if (debug_poison()) device_fill(ptr, 0xFF, bytes, stream);
}

// ---- counters -----------------------------------------------------------------------------------

void zero_begin_micro_step(Zero* zero, long step, int micro) {
    CHECK(zero->config.training && micro >= 0 && micro < zero->config.grad_accum_steps,
          "micro-step %d of %d", micro, zero->config.grad_accum_steps);
    zero->step = zero->comm->step = step;
    zero->micro = zero->comm->micro = micro;
    if (micro > 0) return;
    zero->bad_source = -1;
    zero->is_counting = true;
    zero->elements_before = zero->comm->elements_sent;
    zero->bytes_before = zero->comm->bytes_sent;
}

void zero_end_step(Zero* zero) {
    if (!zero->is_counting) return;
    zero->is_counting = false;
    zero->elements_counted += zero->comm->elements_sent - zero->elements_before;
    zero->bytes_counted += zero->comm->bytes_sent - zero->bytes_before;
}

void zero_take_counters(Zero* zero, size_t* elements, size_t* bytes) {
    *elements = zero->elements_counted;
    *bytes = zero->bytes_counted;
    zero->elements_counted = zero->bytes_counted = 0;
}
