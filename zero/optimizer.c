// zero/optimizer.c - the end of a step: one message for norm, losses and faults, then AdamW.
//
// Norm: every rank squares its own shards in every stage (gradients.c), one double per 1024
// consecutive elements of a unit. Blocks do not depend on world_size, so in exact mode all of them
// travel and are added in canonical order on every rank; in fast mode each rank sends the sum of
// its own. A NaN or an infinity anywhere makes the sum not finite (squares of fp32 cannot overflow
// a double), so all ranks see the same and decide the same without another message.
#include <math.h>
#include <stdio.h>

#include "zero/engine.h"

// ---- the message --------------------------------------------------------------------------------

static double* message_losses(char* message) { return (double*)(message + sizeof(MessageHead)); }

static double* message_partials(const Zero* zero, char* message) {
    return message_losses(message) + zero->config.grad_accum_steps;
}

static char* rank_message(const Zero* zero, int rank) {
    return zero->message + (size_t)rank * zero->layout.message_bytes;
}

static const MessageHead* rank_head(const Zero* zero, int rank) {
    return (const MessageHead*)rank_message(zero, rank);
}

// The first tensor with a non-finite gradient in this rank's shards, and how many elements are so.
static void find_bad_tensor(Zero* zero, MessageHead* head) {
    for (int u = 0; u < zero->partition.num_units; u++) {
        const SegmentList* owned = &zero_unit(zero, u)->owned;
        for (int i = 0; i < owned->count; i++) {
            size_t count = 0;
            find_nonfinite(own_grads(zero, u), zero->config.accum_dtype, &owned->segments[i], 1,
                           &count);
            const int tensor = owned->pieces[i].tensor;
            if (count && (head->bad_tensor < 0 || tensor < head->bad_tensor)) {
                head->bad_tensor = tensor;
            }
            head->bad_count += count;
        }
    }
}

static void fill_own_message(Zero* zero, const double* micro_losses, int signal) {
    event_wait(zero->reduced, STREAM_COMPUTE);
    char* message = zero->own_message;
    double* partials = message_partials(zero, message);
    device_copy(message_losses(message), micro_losses,
                sizeof(double) * (size_t)zero->config.grad_accum_steps, STREAM_COMPUTE);
    device_download(partials, zero->partials, sizeof(double) * zero->layout.partials);

    MessageHead* head = (MessageHead*)message;
    *head = (MessageHead){.signal = signal, .bad_tensor = -1, .bad_source = zero->bad_source};
    for (size_t i = 0; i < zero->layout.partials; i++) head->sum_squares += partials[i];
    if (!isfinite(head->sum_squares)) find_bad_tensor(zero, head);
}

// The sum of squares of all gradients.
static double add_partials(const Zero* zero) {
    double sum = 0;
    if (!zero->config.exact) {
        for (int r = 0; r < zero->config.world_size; r++) sum += rank_head(zero, r)->sum_squares;
        return sum;
    }
    for (int u = 0; u < zero->partition.num_units; u++) {
        const size_t blocks = zero_unit(zero, u)->shard_elems / NORM_BLOCK;
        const size_t first = zero_unit(zero, u)->shard_offset / NORM_BLOCK;
        for (int r = 0; r < zero->config.world_size; r++) {
            const double* partials = message_partials(zero, rank_message(zero, r)) + first;
            for (size_t i = 0; i < blocks; i++) sum += partials[i];
        }
    }
    return sum;
}

StepMessage zero_grad_norm(Zero* zero, const double* micro_losses, size_t tokens, double loss_scale,
                           int signal) {
    Comm* comm = zero->comm;
    fill_own_message(zero, micro_losses, signal);
    comm->host_all_gather(comm, zero->message, zero->own_message, zero->layout.message_bytes);

    StepMessage result = {.nonfinite_rank = -1};
    double loss = 0; // micro-batches in canonical order
    for (int micro = 0; micro < zero->config.grad_accum_steps; micro++) {
        for (int r = 0; r < zero->config.world_size; r++) {
            loss += message_losses(rank_message(zero, r))[micro];
        }
    }
    result.loss = loss / (double)tokens;
    result.grad_norm = sqrt(add_partials(zero)) / loss_scale;
    result.nonfinite = !isfinite(result.loss) || !isfinite(result.grad_norm);
    for (int r = 0; r < zero->config.world_size; r++) {
        const MessageHead* head = rank_head(zero, r);
        if (head->signal > result.signal) result.signal = head->signal;
        result.nonfinite_count += head->bad_count;
        if (head->bad_tensor < 0 || result.nonfinite_rank >= 0) continue;
        result.nonfinite_rank = head->bad_source >= 0 ? head->bad_source : r;
        snprintf(result.nonfinite_tensor, sizeof(result.nonfinite_tensor), "%s",
                 zero->table->tensors[head->bad_tensor].name);
    }
    return result;
}

// ---- the update ---------------------------------------------------------------------------------

void zero_step(Zero* zero, const AdamW* adamw) {
    for (int u = 0; u < zero->partition.num_units; u++) {
        const SegmentList* list = updated_segments(zero, u);
        const size_t start = optimizer_start(zero, u);
        const bool is_full = !zero->layout.optimizer_sharded;
        floatX* weights = updated_weights(zero, u);
        const void* grads = is_full ? grad_address(zero, start) : own_grads(zero, u);
        adamw_update(weights, zero->layout.has_master ? zero->master + start : (float*)weights,
                     zero->m + start, zero->v + start, grads, zero->config.accum_dtype,
                     list->segments, list->count, adamw);
        event_record(zero->updated[u], STREAM_COMPUTE);
    }
    zero_gather_updated(zero);
    zero_end_step(zero);
}

void zero_skip(Zero* zero) { zero_end_step(zero); }
