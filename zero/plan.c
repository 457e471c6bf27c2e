// zero/plan.c - what the engine takes and sends, as integers: lines of memory, elements of traffic.
//
// The run allocates exactly these lines and tests compare its counters with these formulas. With P
// the padded parameters, N ranks, G micro-steps, w bytes of a weight, a of an accumulator, o of
// optimizer state (8 beside fp32 weights, else 12 with the master):
//
//   stage | weights | grads | optimizer | sent per step, in units of P (N-1)/N: fast, exact
//     0   | w P     | a P   | o P       | 2             G + 1
//     1   | w P     | a P   | o P/N     | 2             G + 1
//     2   | w P     | a P/N | o P/N     | G + 1         G + 1
//     3   | w P/N   | a P/N | o P/N     | at most 3 G   at most 3 G
#include <string.h>

#include "core/rng.h"
#include "zero/engine.h"

Layout layout_of(const ZeroConfig* config, const Partition* partition) {
    Layout layout = {0};
    layout.weights_sharded = config->stage >= 3;
    layout.grads_sharded = config->stage >= 2;
    layout.optimizer_sharded = config->stage >= 1;
    layout.has_master = FLOATX_DTYPE != DTYPE_FP32;
    const size_t full = partition->padded_elems, shard = partition->shard_elems;
    layout.weight_elems = layout.weights_sharded ? shard : full;
    layout.slot_elems = partition_block_elems(partition);
    const int blocks = partition->num_units - 1;
    layout.weight_slots = layout.weights_sharded ? (int)min_size(WEIGHT_SLOTS, (size_t)blocks) : 0;
    if (!config->training) return layout;

    layout.grad_elems = layout.grads_sharded ? shard : full;
    layout.optimizer_elems = layout.optimizer_sharded ? shard : full;
    layout.optimizer_bytes = layout.optimizer_elems * sizeof(float) * (layout.has_master ? 3 : 2);
    // Exact mode computes each micro-batch's gradient into a slot of its own and adds it in
    // canonical order; with one micro-batch in all there is nothing to add, and the accumulators
    // hold it as it is, in floatX (in part of the room planned for the type asked for). Fast mode
    // sums up locally where the rank has all accumulators. Kernels add to fp32 only.
    const bool one_term = config->exact && config->world_size * config->grad_accum_steps == 1;
    layout.accum_dtype = one_term ? FLOATX_DTYPE : config->accum_dtype;
    const bool is_fp32 = layout.accum_dtype == DTYPE_FP32;
    layout.local_sum = !config->exact && !layout.grads_sharded;
    layout.direct_blocks =
        one_term || (layout.local_sum && (is_fp32 || config->grad_accum_steps == 1));
    layout.direct_embedding = layout.direct_blocks && is_fp32;
    layout.grad_slots = layout.direct_blocks ? 0 : (int)min_size(GRAD_SLOTS, (size_t)blocks);
    layout.partials = shard / NORM_BLOCK;
    const size_t head = sizeof(MessageHead) + sizeof(double) * (size_t)config->grad_accum_steps;
    layout.own_message_bytes = head + sizeof(double) * layout.partials;
    layout.message_bytes = config->exact ? layout.own_message_bytes : head;
    return layout;
}

static size_t slot_bytes(size_t elems, size_t element_bytes) {
    return (elems + SLOT_SKEW) * element_bytes;
}

void zero_plan(const ZeroConfig* config, const ParamTable* table, Ledger* ledger) {
    Partition partition;
    partition_init(&partition, table, config->world_size, config->rank);
    const Layout layout = layout_of(config, &partition);
    const size_t w = sizeof(floatX), embedding = partition.units[0].padded_elems;
    const size_t world_size = (size_t)config->world_size;

    ledger_add(ledger, MEM_WEIGHTS, "weights", layout.weight_elems * w);
    ledger_add(ledger, MEM_GRADS, "grads", layout.grad_elems * dtype_bytes(config->accum_dtype));
    ledger_add(ledger, MEM_OPTIMIZER, "optimizer", layout.optimizer_bytes);
    if (layout.weights_sharded) {
        ledger_add(ledger, MEM_TRANSIENT, "weight_slots",
                   (size_t)layout.weight_slots * slot_bytes(layout.slot_elems, w));
        ledger_add(ledger, MEM_TRANSIENT, "embedding_weights", slot_bytes(embedding, w));
    }
    if (config->training) {
        ledger_add(ledger, MEM_TRANSIENT, "grad_slots",
                   (size_t)layout.grad_slots * slot_bytes(layout.slot_elems, w));
        if (!layout.direct_embedding) {
            ledger_add(ledger, MEM_TRANSIENT, "embedding_grad",
                       slot_bytes(embedding, sizeof(float)));
        }
        ledger_add(ledger, MEM_TRANSIENT, "norm_partials", layout.partials * sizeof(double));
        ledger_add(ledger, MEM_TRANSIENT, "step_message",
                   world_size * layout.message_bytes + layout.own_message_bytes);
    }
    ledger_add(ledger, MEM_TRANSIENT, "exchange", comm_exchange_bytes(config->world_size));
    partition_free(&partition);
}

size_t zero_padded_params(const ParamTable* table, int world_size) {
    size_t elems = 0;
    for (int u = 0; u < table->num_units; u++) {
        elems += round_up(table->unit_elems[u], (size_t)world_size * SHARD_ALIGN);
    }
    return elems;
}

// ---- traffic ------------------------------------------------------------------------------------

// How often a unit's weights are gathered in a micro-step of stage 3. Slot l mod k is refilled only
// when another block needs it: forward leaves the last k blocks for backward, backward leaves the
// first k for the next micro-step. Unit E stays for the whole step.
static int gathers_of(const Layout* layout, int num_blocks, int unit, bool first_micro_step) {
    if (unit == 0) return first_micro_step ? 1 : 0;
    const int l = unit - 1, k = layout->weight_slots;
    return 2 - (!first_micro_step && l < k) - (l >= num_blocks - k);
}

// Elements that leave this rank in a step, by purpose.
typedef struct {
    size_t gather, reduce, publish;
    size_t unhidden_bytes; // of the step's first gather and last reduction
    size_t publish_element_bytes, reduce_element_bytes;
} Traffic;

static Traffic traffic_of(const ZeroConfig* config, const ParamTable* table) {
    Partition partition;
    partition_init(&partition, table, config->world_size, config->rank);
    const Layout layout = layout_of(config, &partition);
    const size_t peers = (size_t)config->world_size - 1, G = (size_t)config->grad_accum_steps;
    const size_t w = sizeof(floatX), a = dtype_bytes(config->accum_dtype);
    Traffic traffic = {0};
    traffic.reduce_element_bytes = layout.local_sum ? a : w;
    traffic.publish_element_bytes = layout.optimizer_sharded ? w : a;
    for (int u = 0; u < partition.num_units; u++) {
        const size_t sent = peers * partition.units[u].shard_elems;
        traffic.reduce += sent * (layout.local_sum ? 1 : G);
        if (layout.weights_sharded) {
            const size_t first = (size_t)gathers_of(&layout, partition.num_units - 1, u, true);
            const size_t later = (size_t)gathers_of(&layout, partition.num_units - 1, u, false);
            traffic.gather += sent * (first + (G - 1) * later);
        } else {
            traffic.publish += sent; // stage 0: of the accumulators
        }
    }
    const size_t embedding = peers * partition.units[0].shard_elems;
    traffic.unhidden_bytes =
        embedding * (traffic.reduce_element_bytes + (layout.weights_sharded ? w : 0));
    partition_free(&partition);
    return traffic;
}

void zero_traffic(const ZeroConfig* config, const ParamTable* table, size_t* elements,
                  size_t* bytes) {
    const Traffic t = traffic_of(config, table);
    *elements = t.gather + t.reduce + t.publish;
    *bytes = t.gather * sizeof(floatX) + t.reduce * t.reduce_element_bytes +
             t.publish * t.publish_element_bytes;
}

ZeroPrediction zero_predict(const ZeroConfig* config, const ParamTable* table, double link_gb_s,
                            double compute_ms) {
    const Traffic t = traffic_of(config, table);
    const double ms_per_byte = 1e3 / (link_gb_s * 1e9);
    ZeroPrediction p;
    p.gather_ms = (double)(t.gather * sizeof(floatX)) * ms_per_byte;
    p.reduce_ms = (double)(t.reduce * t.reduce_element_bytes) * ms_per_byte;
    p.publish_ms = (double)(t.publish * t.publish_element_bytes) * ms_per_byte;
    const double unhidden_ms = (double)t.unhidden_bytes * ms_per_byte;
    const double hidden_ms = p.gather_ms + p.reduce_ms + p.publish_ms - unhidden_ms;
    p.exposed_ms = unhidden_ms + (hidden_ms > compute_ms ? hidden_ms - compute_ms : 0);
    return p;
}

// ---- agreement ----------------------------------------------------------------------------------

uint64_t zero_config_hash(const ZeroConfig* config, const ParamTable* table) {
    uint64_t hash = 0;
    const uint64_t words[] = {(uint64_t)config->stage,
                              config->exact,
                              (uint64_t)config->accum_dtype,
                              (uint64_t)FLOATX_DTYPE,
                              (uint64_t)config->world_size,
                              (uint64_t)config->grad_accum_steps,
                              config->training,
                              WEIGHT_SLOTS,
                              GRAD_SLOTS,
                              (uint64_t)table->num_units,
                              (uint64_t)table->num_tensors};
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) hash = mix64(hash + words[i]);
    for (int t = 0; t < table->num_tensors; t++) {
        const TensorSpec* spec = &table->tensors[t];
        hash = mix64(hash + spec->unit_offset);
        hash = mix64(hash + spec->elems * 2 + spec->decay);
    }
    return hash;
}
