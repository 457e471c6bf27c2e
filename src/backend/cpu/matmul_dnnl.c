// backend/cpu/matmul_dnnl.c - one product in one thread, by oneDNN (2.x and 3.x).
//
// Each thread keeps a table of primitives by shape, created for one thread on first use: creation
// generates code (about 0.3 ms), a later call costs a look-up.
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/cpu/matmul.h"
#include "backend/cpu/onednn.h"

// ---- primitives by shape ------------------------------------------------------------------------

enum { ARG_A, ARG_B, ARG_BIAS, ARG_OUT, ARG_SCRATCH, NUM_ARGS };

typedef struct {
    ProductKey key; // M = 0: free
    dnnl_primitive_t primitive;
    dnnl_memory_t memories[NUM_ARGS]; // handles are set at each call
    bool fits;                        // its scratch fits into PRODUCT_SCRATCH_BYTES
} Entry;

enum { TABLE_ENTRIES = 512, PROBES = 8 };

// One per thread: memory handles are state of a call.
typedef struct {
    dnnl_stream_t stream;
    int next_victim;
    Entry entries[TABLE_ENTRIES];
} Table;

static struct {
    dnnl_engine_t engine;
    Table* tables; // (threads)
    int threads;
    bool takes_floatX;
    char description[100];
} onednn;

static void entry_free(Entry* entry) {
    if (entry->key.M == 0) return;
    DNNLCHECK(dnnl_primitive_destroy(entry->primitive));
    for (int i = 0; i < NUM_ARGS; i++) DNNLCHECK(dnnl_memory_destroy(entry->memories[i]));
    entry->key.M = 0;
}

static void create_memory(dnnl_memory_t* memory, LayoutArg layout) {
    DNNLCHECK(dnnl_memory_create(memory, layout, onednn.engine, DNNL_MEMORY_NONE));
}

// The library plans for as many threads as the caller's next parallel region would have: one.
static void entry_create(Entry* entry, const ProductKey* key) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1); // of this thread only, when inside a parallel region
    Layouts layouts;
    dnnl_primitive_desc_t description;
    layouts_init(&layouts, key);
    DNNLCHECK(
        create_description(&description, onednn.engine, &layouts, key, dnnl_scratchpad_mode_user));
    entry->fits =
        dnnl_memory_desc_get_size(scratchpad_layout(description)) <= PRODUCT_SCRATCH_BYTES;
    if (!entry->fits) { // no case known; the library then allocates it itself
        DNNLCHECK(dnnl_primitive_desc_destroy(description));
        DNNLCHECK(create_description(&description, onednn.engine, &layouts, key,
                                     dnnl_scratchpad_mode_library));
    }
    DNNLCHECK(dnnl_primitive_create(&entry->primitive, description));
    create_memory(&entry->memories[ARG_A], layout_arg(&layouts.a));
    create_memory(&entry->memories[ARG_B], layout_arg(&layouts.b));
    create_memory(&entry->memories[ARG_BIAS], layout_arg(&layouts.bias));
    create_memory(&entry->memories[ARG_OUT], layout_arg(&layouts.out));
    create_memory(&entry->memories[ARG_SCRATCH], scratchpad_layout(description));
    DNNLCHECK(dnnl_primitive_desc_destroy(description));
    layouts_free(&layouts);
    entry->key = *key;
    omp_set_num_threads(threads);
}

static uint64_t key_hash(const ProductKey* key) {
    const unsigned char* bytes = (const unsigned char*)key;
    uint64_t hash = 14695981039346656037ull; // FNV-1a
    for (size_t i = 0; i < sizeof *key; i++) hash = (hash ^ bytes[i]) * 1099511628211ull;
    return hash ^ (hash >> 32);
}

static Entry* find_or_create(Table* table, const ProductKey* key) {
    const uint64_t start = key_hash(key);
    for (uint64_t probe = 0; probe < PROBES; probe++) {
        Entry* entry = &table->entries[(start + probe) % TABLE_ENTRIES];
        if (entry->key.M != 0 && memcmp(&entry->key, key, sizeof *key) == 0) return entry;
        if (entry->key.M == 0) {
            entry_create(entry, key);
            return entry;
        }
    }
    const uint64_t victim = (uint64_t)(table->next_victim++ % PROBES);
    Entry* entry = &table->entries[(start + victim) % TABLE_ENTRIES];
    entry_free(entry);
    entry_create(entry, key);
    return entry;
}

// ---- the product --------------------------------------------------------------------------------

static bool can_multiply(DType dtype) {
    const ProductKey key = {.M = 64,
                            .N = 64,
                            .K = 64,
                            .in_dtype = dtype,
                            .out_dtype = DTYPE_FP32,
                            .a_row = 64,
                            .a_col = 1,
                            .b_row = 64,
                            .b_col = 1,
                            .out_ld = 64};
    Layouts layouts;
    dnnl_primitive_desc_t description;
    layouts_init(&layouts, &key);
    const dnnl_status_t status =
        create_description(&description, onednn.engine, &layouts, &key, dnnl_scratchpad_mode_user);
    layouts_free(&layouts);
    if (status != dnnl_success) return false;
    // Where the processor lacks the type, the library may emulate it, slower than fp32: only
    // kernels made for the type count.
    const char* implementation = "";
    DNNLCHECK(dnnl_primitive_desc_query(description, dnnl_query_impl_info_str, 0, &implementation));
    const bool is_native = strncmp(implementation, "brg", 3) == 0;
    DNNLCHECK(dnnl_primitive_desc_destroy(description));
    return is_native;
}

// Engine, and what it can do: once, when first asked.
static void probe(void) {
    if (onednn.engine != NULL) return;
    DNNLCHECK(dnnl_engine_create(&onednn.engine, dnnl_cpu, 0));
    onednn.takes_floatX = FLOATX_DTYPE == DTYPE_FP32 || can_multiply(FLOATX_DTYPE);
    const dnnl_version_t* version = dnnl_version();
    snprintf(onednn.description, sizeof onednn.description, "oneDNN %d.%d.%d %s%s", version->major,
             version->minor, version->patch, dtype_name(FLOATX_DTYPE),
             onednn.takes_floatX ? "" : " widened to fp32");
}

void product_init(void) {
    probe();
    onednn.threads = omp_get_max_threads();
    onednn.tables = checked_calloc((size_t)onednn.threads, sizeof(Table));
    for (int i = 0; i < onednn.threads; i++) {
        DNNLCHECK(
            dnnl_stream_create(&onednn.tables[i].stream, onednn.engine, dnnl_stream_default_flags));
    }
}

void product_free(void) {
    for (int i = 0; i < onednn.threads; i++) {
        for (int e = 0; e < TABLE_ENTRIES; e++) entry_free(&onednn.tables[i].entries[e]);
        DNNLCHECK(dnnl_stream_destroy(onednn.tables[i].stream));
    }
    free(onednn.tables);
    DNNLCHECK(dnnl_engine_destroy(onednn.engine));
    memset(&onednn, 0, sizeof onednn);
}

const char* product_description(void) {
    probe();
    return onednn.description;
}

bool product_takes_floatX(void) { return onednn.takes_floatX; }

void product_run(const Product* product, void* scratch) {
    ProductKey key;
    memset(&key, 0, sizeof key);
    key.M = product->M;
    key.N = product->N;
    key.K = product->K;
    key.in_dtype = product->in_dtype;
    key.out_dtype = product->out_dtype;
    key.has_bias = product->bias != NULL;
    key.accumulate = product->accumulate;
    key.a_row = product->a.row_stride;
    key.a_col = product->a.col_stride;
    key.b_row = product->b.row_stride;
    key.b_col = product->b.col_stride;
    key.out_ld = product->out_ld;

    Table* table = &onednn.tables[omp_get_thread_num()];
    const Entry* entry = find_or_create(table, &key);
    // Handles are void*, whatever is only read.
    void* handles[NUM_ARGS] = {(void*)(uintptr_t)product->a.ptr, (void*)(uintptr_t)product->b.ptr,
                               (void*)(uintptr_t)product->bias, product->out, scratch};
    const int names[NUM_ARGS] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DST,
                                 DNNL_ARG_SCRATCHPAD};
    dnnl_exec_arg_t args[NUM_ARGS];
    int num_args = 0;
    for (int i = 0; i < NUM_ARGS; i++) {
        if ((i == ARG_BIAS && !key.has_bias) || (i == ARG_SCRATCH && !entry->fits)) continue;
        DNNLCHECK(dnnl_memory_set_data_handle(entry->memories[i], handles[i]));
        args[num_args++] = (dnnl_exec_arg_t){names[i], entry->memories[i]};
    }
    DNNLCHECK(dnnl_primitive_execute(entry->primitive, table->stream, num_args, args));
}
