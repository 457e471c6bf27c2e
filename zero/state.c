// zero/state.c - the fp32 state from outside: first values, reading and writing files, the hash.
//
// All of it goes over tensors in canonical order, whoever owns the elements; nothing here depends
// on how they are sharded, so a checkpoint of one stage and world size is a checkpoint of every
// other.
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "zero/engine.h"

// At stage 0 every rank holds every element, at the others one rank does.
static bool is_replicated(const Zero* zero) { return !zero->layout.optimizer_sharded; }

// Element 0 of what this rank holds of a unit: the unit at stage 0, else its shard.
static float* state_of_unit(const Zero* zero, StateKind kind, int unit) {
    const size_t start = optimizer_start(zero, unit);
    switch (kind) {
    case STATE_M:
        return zero->m + start;
    case STATE_V:
        return zero->v + start;
    default:
        break;
    }
    if (zero->layout.has_master) return zero->master + start;
    return (float*)updated_weights(zero, unit);
}

// Without training there are no masters: the values go straight into the working weights.
static bool writes_weights(const Zero* zero) {
    return zero->layout.has_master && !zero->config.training;
}

// Stores n <= HOST_CHUNK values from `at` on in what this rank holds of a unit.
static void put_values(Zero* zero, StateKind kind, int unit, size_t at, const float* values,
                       size_t n) {
    if (!writes_weights(zero)) {
        device_upload(state_of_unit(zero, kind, unit) + at, values, n * sizeof(float));
        return;
    }
    CHECK(kind == STATE_MASTER, "moments are written without training");
    floatX rounded[1024];
    floatX* weights = updated_weights(zero, unit);
    for (size_t i = 0; i < n; i += 1024) {
        const size_t part = min_size(1024, n - i);
        for (size_t j = 0; j < part; j++) rounded[j] = to_floatX(values[i + j]);
        device_upload(weights + at + i, rounded, part * sizeof(floatX));
    }
}

void zero_init_weights(Zero* zero,
                       void (*fill)(float*, const ParamTable*, int, size_t, size_t, uint64_t),
                       uint64_t seed) {
    if (zero->config.training) { // m, then v: the engine may have trained before
        device_fill(zero->m, 0, 2 * zero->layout.optimizer_elems * sizeof(float), STREAM_COMPUTE);
    }
    for (int u = 0; u < zero->partition.num_units; u++) {
        const SegmentList* list = updated_segments(zero, u);
        for (int i = 0; i < list->count; i++) {
            const Segment* segment = &list->segments[i];
            for (size_t done = 0; done < segment->elems; done += HOST_CHUNK) {
                const size_t n = min_size(HOST_CHUNK, segment->elems - done);
                fill(zero->host_chunk, zero->table, list->pieces[i].tensor,
                     list->pieces[i].first + done, n, seed);
                put_values(zero, STATE_MASTER, u, segment->offset + done, zero->host_chunk, n);
            }
        }
    }
    zero_publish(zero);
}

void zero_publish(Zero* zero) {
    zero->comm->barrier(zero->comm); // nobody reads the old weights any more
    for (int u = 0; u < zero->partition.num_units; u++) {
        const Unit* at = zero_unit(zero, u);
        if (zero->layout.has_master && zero->config.training) {
            convert(updated_weights(zero, u), FLOATX_DTYPE, state_of_unit(zero, STATE_MASTER, u),
                    DTYPE_FP32, is_replicated(zero) ? at->padded_elems : at->shard_elems,
                    STREAM_COMPUTE);
        }
        event_record(zero->updated[u], STREAM_COMPUTE);
    }
    zero_gather_updated(zero);
}

// ---- files --------------------------------------------------------------------------------------

// The next run of a tensor's elements [done, count) that one rank holds and a chunk can take.
typedef struct {
    int owner;
    size_t at; // in what the owner holds of the unit
    size_t n;
} Run;

static Run next_run(const Zero* zero, int unit, size_t element, size_t remaining) {
    const size_t n = min_size(remaining, HOST_CHUNK);
    if (is_replicated(zero)) return (Run){0, element, n};
    const size_t shard_elems = zero_unit(zero, unit)->shard_elems;
    const size_t owner = element / shard_elems, at = element % shard_elems;
    return (Run){(int)owner, at, min_size(n, shard_elems - at)};
}

static void check_range(const Zero* zero, int tensor, size_t first, size_t count) {
    CHECK(tensor >= 0 && tensor < zero->table->num_tensors, "tensor %d", tensor);
    CHECK(count <= ZERO_IO_ELEMS && first + count <= zero->table->tensors[tensor].elems,
          "elements %zu + %zu of %s", first, count, zero->table->tensors[tensor].name);
}

void zero_read(Zero* zero, StateKind kind, int tensor, size_t first, size_t count, float* out) {
    check_range(zero, tensor, first, count);
    CHECK(!writes_weights(zero), "there are no masters to read");
    const TensorSpec* spec = &zero->table->tensors[tensor];
    Comm* comm = zero->comm;
    for (size_t done = 0; done < count;) {
        const Run run = next_run(zero, spec->unit, spec->unit_offset + first + done, count - done);
        float* values = comm->rank == 0 ? out + done : zero->host_chunk;
        if (comm->rank == run.owner) {
            device_download(values, state_of_unit(zero, kind, spec->unit) + run.at,
                            run.n * sizeof(float));
        }
        if (run.owner != 0 && comm->rank == run.owner) {
            comm->host_send(comm, values, run.n * sizeof(float), 0);
        } else if (run.owner != 0 && comm->rank == 0) {
            comm->host_recv(comm, values, run.n * sizeof(float), run.owner);
        }
        done += run.n;
    }
}

void zero_write(Zero* zero, StateKind kind, int tensor, size_t first, size_t count,
                const float* in) {
    check_range(zero, tensor, first, count);
    const TensorSpec* spec = &zero->table->tensors[tensor];
    Comm* comm = zero->comm;
    for (size_t done = 0; done < count;) {
        const Run run = next_run(zero, spec->unit, spec->unit_offset + first + done, count - done);
        const bool holds = is_replicated(zero) || comm->rank == run.owner;
        if (comm->rank == 0) memcpy(zero->host_chunk, in + done, run.n * sizeof(float));
        if (is_replicated(zero)) {
            comm->host_broadcast(comm, zero->host_chunk, run.n * sizeof(float), 0);
        } else if (run.owner != 0 && comm->rank == 0) {
            comm->host_send(comm, zero->host_chunk, run.n * sizeof(float), run.owner);
        } else if (run.owner != 0 && holds) {
            comm->host_recv(comm, zero->host_chunk, run.n * sizeof(float), 0);
        }
        if (holds) put_values(zero, kind, spec->unit, run.at, zero->host_chunk, run.n);
        done += run.n;
    }
}

// ---- hash ---------------------------------------------------------------------------------------

uint64_t zero_params_hash(Zero* zero) {
    CHECK(!writes_weights(zero), "there are no masters to hash");
    uint64_t sum = 0;
    for (int u = 0; u < zero->partition.num_units; u++) {
        const Unit* at = zero_unit(zero, u);
        const float* shard = state_of_unit(zero, STATE_MASTER, u);
        if (is_replicated(zero)) shard += (size_t)zero->partition.rank * at->shard_elems;
        for (int i = 0; i < at->owned.count; i++) {
            const Segment* segment = &at->owned.segments[i];
            const Piece* piece = &at->owned.pieces[i];
            const size_t canonical =
                zero->table->tensors[piece->tensor].canonical_offset + piece->first;
            for (size_t done = 0; done < segment->elems; done += HOST_CHUNK) {
                const size_t n = min_size(HOST_CHUNK, segment->elems - done);
                device_download(zero->host_chunk, shard + segment->offset + done,
                                n * sizeof(float));
                for (size_t j = 0; j < n; j++) {
                    sum += mix64((canonical + done + j) * 0x9E3779B97F4A7C15ull +
                                 float_bits(zero->host_chunk[j]));
                }
            }
        }
    }
    const size_t N = (size_t)zero->config.world_size;
    uint64_t *sums = checked_malloc(N * sizeof(uint64_t)), total = 0;
    zero->comm->host_all_gather(zero->comm, sums, &sum, sizeof(sum));
    for (size_t r = 0; r < N; r++) total += sums[r];
    free(sums);
    return total;
}
