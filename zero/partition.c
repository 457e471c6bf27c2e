// zero/partition.c - which rank owns which elements. See partition.h.
#include "zero/partition.h"

#include <stdlib.h>
#include <string.h>

// Appends the part of a tensor that lies in elements [begin, end) of its unit, if there is one.
static void add_part(SegmentList* list, const ParamTable* table, int tensor, size_t begin,
                     size_t end) {
    const TensorSpec* spec = &table->tensors[tensor];
    const size_t from = max_size(spec->unit_offset, begin);
    const size_t to = min_size(spec->unit_offset + spec->elems, end);
    if (from >= to) return;
    const Segment* last = list->count > 0 ? &list->segments[list->count - 1] : NULL;
    CHECK(!last || from - begin >= last->offset + last->elems,
          "unit %d: tensors overlap or are out of order in the table", spec->unit);
    list->segments[list->count] = (Segment){from - begin, to - from, spec->decay};
    list->pieces[list->count++] = (Piece){tensor, from - spec->unit_offset};
}

static SegmentList segment_list_create(size_t capacity) {
    return (SegmentList){0, checked_calloc(capacity, sizeof(Segment)),
                         checked_calloc(capacity, sizeof(Piece))};
}

static void segment_list_free(SegmentList* list) {
    free(list->segments);
    free(list->pieces);
}

// Which parts of which tensors lie in each unit and in this rank's shard of it.
static void build_segment_lists(Partition* partition, const ParamTable* table) {
    size_t* num_tensors = checked_calloc((size_t)table->num_units, sizeof(size_t)); // of each unit
    for (int t = 0; t < table->num_tensors; t++) num_tensors[table->tensors[t].unit]++;
    for (int u = 0; u < table->num_units; u++) {
        partition->units[u].all = segment_list_create(num_tensors[u]);
        partition->units[u].owned = segment_list_create(num_tensors[u]);
    }
    free(num_tensors);
    for (int t = 0; t < table->num_tensors; t++) {
        Unit* unit = &partition->units[table->tensors[t].unit];
        const size_t begin = (size_t)partition->rank * unit->shard_elems;
        add_part(&unit->all, table, t, 0, unit->padded_elems);
        add_part(&unit->owned, table, t, begin, begin + unit->shard_elems);
    }
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
    }
    build_segment_lists(partition, table);
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
