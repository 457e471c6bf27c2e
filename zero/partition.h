// zero/partition.h - which rank owns which elements. Integers only.
//
// A unit of E elements is padded to P = round_up(E, world_size * SHARD_ALIGN) and cut into
// world_size equal shards; rank r owns [r * P/world_size, (r+1) * P/world_size), wherever tensors
// begin or end. Elements that belong to no tensor (gaps, wte rows from V on, the end of the unit)
// are padding: always zero as weights, never part of norm, update, file or hash.
//
// Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 5.
#ifndef ZERO_PARTITION_H
#define ZERO_PARTITION_H

#include "backend/ops.h"
#include "core/params.h"

#ifdef __cplusplus
extern "C" {
#endif

// A shard is whole norm blocks, so that no block is cut whatever world_size is.
enum { SHARD_ALIGN = NORM_BLOCK };

// The part of a tensor that lies in some range of a unit.
typedef struct {
    int tensor;
    size_t first; // its first element inside the tensor
} Piece;

// The tensors' parts in a range of a unit, in rising order; pieces[i] is segments[i].
typedef struct {
    int count;
    Segment* segments; // offsets from the start of the range
    Piece* pieces;
} SegmentList;

// Where a unit lies. A `full` buffer holds all units padded, one after the other; a `shard` buffer
// holds one rank's shard of each.
typedef struct {
    size_t padded_elems, shard_elems; // padded_elems = world_size * shard_elems
    size_t full_offset, shard_offset;
    SegmentList all;   // of the whole unit
    SegmentList owned; // of this rank's shard
} Unit;

typedef struct {
    int world_size, rank, num_units;
    Unit* units;         // (num_units)
    size_t padded_elems; // of all units
    size_t shard_elems;  // padded_elems / world_size
} Partition;

void partition_init(Partition* partition, const ParamTable* table, int world_size, int rank);
void partition_free(Partition* partition);

// The largest padded unit among the blocks (units 1 ..); 0 if there is none.
size_t partition_block_elems(const Partition* partition);

#ifdef __cplusplus
}
#endif
#endif
