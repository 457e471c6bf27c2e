// zero/partition.c - which rank owns which elements. See partition.h.
#include "zero/partition.h"

#include <stdlib.h>
#include <string.h>

SegmentList segment_list_build(const ParamTable* table, int unit, size_t begin, size_t end) {
    SegmentList list = {0, NULL, NULL};
    for (int pass = 0; pass < 2; pass++) { // count, then fill
        int count = 0;
        for (int t = 0; t < table->num_tensors; t++) {
            const TensorSpec* spec = &table->tensors[t];
            size_t from = max_size(spec->unit_offset, begin);
            size_t to = min_size(spec->unit_offset + spec->elems, end);
            if (spec->unit != unit || from >= to) continue;
            if (pass == 1) {
                list.segments[count] = (Segment){from - begin, to - from, spec->decay};
                list.pieces[count] = (Piece){t, from - spec->unit_offset};
            }
            count++;
        }
        if (pass == 0) {
            list.count = count;
            list.segments = checked_calloc((size_t)count + 1, sizeof(Segment));
            list.pieces = checked_calloc((size_t)count + 1, sizeof(Piece));
        }
    }
    for (int i = 1; i < list.count; i++) {
        CHECK(list.segments[i].offset >= list.segments[i - 1].offset + list.segments[i - 1].elems,
              "unit %d: tensors overlap or are out of order in the table", unit);
    }
    return list;
}

void segment_list_free(SegmentList* list) {
    free(list->segments);
    free(list->pieces);
    memset(list, 0, sizeof(*list));
}

void partition_init(Partition* partition, const ParamTable* table, int world_size, int rank) {
    CHECK(world_size >= 1 && rank >= 0 && rank < world_size, "rank %d of %d", rank, world_size);
    memset(partition, 0, sizeof(*partition));
    partition->world_size = world_size;
    partition->rank = rank;
    partition->num_units = table->num_units;
    partition->units = checked_calloc((size_t)table->num_units, sizeof(Unit));
    for (int u = 0; u < table->num_units; u++) {
        Unit* unit = &partition->units[u];
        unit->padded_elems = round_up(table->unit_elems[u], (size_t)world_size * SHARD_ALIGN);
        unit->shard_elems = unit->padded_elems / (size_t)world_size;
        unit->full_offset = partition->padded_elems;
        unit->shard_offset = partition->shard_elems;
        partition->padded_elems += unit->padded_elems;
        partition->shard_elems += unit->shard_elems;
        size_t begin = (size_t)rank * unit->shard_elems;
        unit->all = segment_list_build(table, u, 0, unit->padded_elems);
        unit->owned = segment_list_build(table, u, begin, begin + unit->shard_elems);
    }
}

void partition_free(Partition* partition) {
    for (int u = 0; u < partition->num_units; u++) {
        segment_list_free(&partition->units[u].all);
        segment_list_free(&partition->units[u].owned);
    }
    free(partition->units);
    memset(partition, 0, sizeof(*partition));
}

size_t partition_block_elems(const Partition* partition) {
    size_t elems = 0;
    for (int u = 1; u < partition->num_units; u++) {
        elems = max_size(elems, partition->units[u].padded_elems);
    }
    return elems;
}
