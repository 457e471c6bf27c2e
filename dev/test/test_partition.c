// dev/test/test_partition.c - shards tile every unit exactly, whatever its size and the number of
// ranks: units of 1 to 5,000 elements and GPT-2's own, world_size 1 to 9.
#include <stdlib.h>
#include <string.h>

#include "dev/test/testing.h"
#include "gpt2/gpt2.h"
#include "zero/partition.h"
#include "zero/zero.h"

enum { MAX_WORLD_SIZE = 9 };

// Every element of every tensor has exactly one owner, and the owner's segment leads back to it.
static void check_ownership(const ParamTable* table, const Partition* ranks, int world_size) {
    size_t canonical_seen = 0;
    unsigned char* seen = checked_calloc(table->num_params, 1);
    for (int r = 0; r < world_size; r++) {
        for (int u = 0; u < table->num_units; u++) {
            const Unit* unit = &ranks[r].units[u];
            size_t end = 0;
            for (int i = 0; i < unit->owned.count; i++) {
                const Segment* segment = &unit->owned.segments[i];
                const Piece* piece = &unit->owned.pieces[i];
                const TensorSpec* spec = &table->tensors[piece->tensor];
                EXPECT(segment->elems > 0 && segment->offset >= end &&
                           segment->offset + segment->elems <= unit->shard_elems,
                       "rank %d unit %d segment %d leaves its shard", r, u, i);
                end = segment->offset + segment->elems;
                EXPECT(spec->unit == u && segment->decay == spec->decay,
                       "rank %d unit %d segment %d is not tensor %s", r, u, i, spec->name);
                EXPECT(spec->unit_offset + piece->first ==
                           (size_t)r * unit->shard_elems + segment->offset,
                       "rank %d: %s is in the wrong place", r, spec->name);
                for (size_t j = 0; j < segment->elems; j++) {
                    seen[spec->canonical_offset + piece->first + j]++;
                }
                canonical_seen += segment->elems;
            }
        }
    }
    size_t once = 0;
    for (size_t i = 0; i < table->num_params; i++) once += seen[i] == 1;
    EXPECT(canonical_seen == table->num_params && once == table->num_params,
           "%zu of %zu elements owned exactly once", once, table->num_params);
    free(seen);
}

static void check_offsets(const ParamTable* table, const Partition* partition, int world_size) {
    size_t full = 0, shard = 0;
    for (int u = 0; u < table->num_units; u++) {
        const Unit* unit = &partition->units[u];
        EXPECT(unit->padded_elems == unit->shard_elems * (size_t)world_size, "unit %d", u);
        EXPECT(unit->shard_elems % SHARD_ALIGN == 0, "unit %d: shard of %zu", u, unit->shard_elems);
        EXPECT(unit->padded_elems >= table->unit_elems[u] &&
                   unit->padded_elems < table->unit_elems[u] + (size_t)world_size * SHARD_ALIGN,
               "unit %d: %zu elements padded to %zu", u, table->unit_elems[u], unit->padded_elems);
        EXPECT(unit->full_offset == full && unit->shard_offset == shard, "unit %d: offset", u);
        full += unit->padded_elems;
        shard += unit->shard_elems;
    }
    EXPECT(partition->padded_elems == full && partition->shard_elems == shard, "sums");
    EXPECT(zero_padded_params(table, world_size) == full, "padded parameters of the plan");
}

static void check_table(const ParamTable* table) {
    for (int N = 1; N <= MAX_WORLD_SIZE; N++) {
        Partition ranks[MAX_WORLD_SIZE];
        for (int r = 0; r < N; r++) partition_init(&ranks[r], table, N, r);
        for (int r = 0; r < N; r++) check_offsets(table, &ranks[r], N);
        check_ownership(table, ranks, N);
        for (int r = 0; r < N; r++) partition_free(&ranks[r]);
    }
}

// One unit of two tensors, `first` and `second` elements.
static void check_pair(size_t first, size_t second) {
    TensorSpec tensors[2] = {
        {.name = "a", .elems = first, .decay = true},
        {.name = "b", .elems = second, .canonical_offset = first},
    };
    tensors[1].unit_offset = round_up(first, PARAM_ALIGN);
    size_t unit_elems = round_up(tensors[1].unit_offset + second, PARAM_ALIGN);
    ParamTable table = {tensors, 2, 1, &unit_elems, first + second};
    check_table(&table);
}

int main(void) {
    for (size_t first = 1; first <= 5000; first += first < 70 ? 1 : 61) {
        check_pair(first, 1);
        check_pair(1, first);
        check_pair(first, 1025);
    }
    test_report("units of two tensors, 1 to 5000 elements, world_size 1..%d", MAX_WORLD_SIZE);

    const char* const models[] = {"L=3,NH=3,C=48,V=257,T=32", "L=1,NH=1,C=4,V=3,T=1",
                                  "L=2,NH=3,C=60,V=251,T=64", "L=1,NH=2,C=8,V=11,T=7"};
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        GPT2Config config;
        ParamTable table;
        Error error = {0};
        CHECK(gpt2_config_parse(&config, models[i], 257, NULL, &error), "%s", error.text);
        gpt2_param_table(&table, &config);
        check_table(&table);
        param_table_free(&table);
        test_report("GPT-2 %s, world_size 1..%d", models[i], MAX_WORLD_SIZE);
    }
    return test_finish();
}
