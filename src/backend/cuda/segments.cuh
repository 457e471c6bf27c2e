// backend/cuda/segments.cuh - the runs of a shard, handed to a kernel as one argument.
#ifndef BACKEND_CUDA_SEGMENTS_CUH
#define BACKEND_CUDA_SEGMENTS_CUH

#include "backend/cuda/common.cuh"

// [begin, end) of a buffer.
struct SegmentRange {
    size_t begin, end;
    bool decay;
};

// A kernel's arguments may take 4 KB; a unit of GPT-2 has at most 12 tensors.
struct SegmentTable {
    static constexpr int MAX = 64;
    SegmentRange at[MAX];
    int count;
};

// Calls run(table, elements of its largest segment) for all segments, at most MAX at a time.
template <class Run>
inline void for_each_table(const Segment* segments, int num_segments, Run run) {
    for (int i = 0; i < num_segments;) {
        SegmentTable table = {};
        size_t largest = 0;
        for (; i < num_segments && table.count < SegmentTable::MAX; i++) {
            const Segment& s = segments[i];
            if (s.elems == 0) continue;
            table.at[table.count++] = {s.offset, s.offset + s.elems, s.decay};
            largest = max_size(largest, s.elems);
        }
        if (table.count > 0) run(table, largest);
    }
}

#endif
