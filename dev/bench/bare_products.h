// dev/bench/bare_products.h - the matrix products of one training step and nothing else, given to
// oneDNN as whole matrices with its own threads: what the step is measured against.
//
// Part of bench_step.c. A build with DNNL=0 has nothing to compare with and does not compile it.
#ifndef DEV_BENCH_BARE_PRODUCTS_H
#define DEV_BENCH_BARE_PRODUCTS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/onednn.h"
#include "core/rng.h"
#include "gpt2/gpt2.h"

enum {
    BARE_FORWARD,
    BARE_INPUT,
    BARE_WEIGHT,
    NUM_BARE_KINDS = 6
}; // blocks, then the same of the head

// Best of the runs so far, in seconds.
typedef struct {
    double total, kinds[NUM_BARE_KINDS];
    double flops, kind_flops[NUM_BARE_KINDS]; // of one step
    // The GEMM peak: the fastest product, over its calls in a step. Its fastest single call is
    // more, but those few milliseconds of boost are what no second holds.
    double peak_flops, burst_flops;
} BareTimes;

enum { NUM_WEIGHTS = 5, NUM_PRODUCTS = 3 * NUM_WEIGHTS };

typedef struct {
    ProductKey key;
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, out, scratch;
    int kind, repeats; // per step
} BareProduct;

// Buffers: activations of C and of OC columns, weights, gradients of weights.
enum { BUFFER_IN, BUFFER_OUT, BUFFER_WEIGHT, BUFFER_GRAD, NUM_BUFFERS };

typedef struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    BareProduct products[NUM_PRODUCTS];
    char* buffers[NUM_BUFFERS];
    void* scratch;
    size_t weight_elems; // of the buffer, walked through so that weights are cold
} BareProducts;

static inline dnnl_memory_t bare_memory(const BareProducts* bare, LayoutArg layout) {
    dnnl_memory_t memory;
    DNNLCHECK(dnnl_memory_create(&memory, layout, bare->engine, DNNL_MEMORY_NONE));
    return memory;
}

static inline size_t bare_create(BareProducts* bare, BareProduct* product) {
    Layouts layouts;
    dnnl_primitive_desc_t description;
    layouts_init(&layouts, &product->key);
    DNNLCHECK(create_description(&description, bare->engine, &layouts, &product->key,
                                 dnnl_scratchpad_mode_user));
    DNNLCHECK(dnnl_primitive_create(&product->primitive, description));
    product->a = bare_memory(bare, layout_arg(&layouts.a));
    product->b = bare_memory(bare, layout_arg(&layouts.b));
    product->out = bare_memory(bare, layout_arg(&layouts.out));
    product->scratch = bare_memory(bare, scratchpad_layout(description));
    const size_t scratch_bytes = dnnl_memory_desc_get_size(scratchpad_layout(description));
    DNNLCHECK(dnnl_primitive_desc_destroy(description));
    layouts_free(&layouts);
    return scratch_bytes;
}

// The three products of a weight (C, OC), or (OC, C) for the head, with N rows of activations.
static inline void bare_describe(BareProduct products[3], int C, int OC, int N, size_t stride_rows,
                                 int repeats, bool head) {
    const size_t c = (size_t)C, oc = (size_t)OC;
    const size_t in_ld = ops_row_stride(stride_rows, c), out_ld = ops_row_stride(stride_rows, oc);
    const size_t w_row = head ? 1 : oc, w_col = head ? c : 1; // of the weight as (C, OC)
    memset(products, 0, 3 * sizeof *products);
    for (int i = 0; i < 3; i++) {
        products[i].kind = i + (head ? 3 : 0);
        products[i].repeats = repeats;
        products[i].key.in_dtype = products[i].key.out_dtype = FLOATX_DTYPE;
    }
    ProductKey *forward = &products[0].key, *input = &products[1].key, *weight = &products[2].key;
    forward->M = N, forward->N = OC, forward->K = C;
    forward->a_row = in_ld, forward->a_col = 1;
    forward->b_row = w_row, forward->b_col = w_col;
    forward->out_ld = out_ld;
    input->M = N, input->N = C, input->K = OC;
    input->a_row = out_ld, input->a_col = 1;
    input->b_row = w_col, input->b_col = w_row;
    input->out_ld = in_ld;
    weight->M = head ? OC : C, weight->N = head ? C : OC, weight->K = N;
    weight->a_row = 1, weight->a_col = head ? out_ld : in_ld;
    weight->b_row = head ? in_ld : out_ld, weight->b_col = 1;
    weight->out_ld = head ? c : oc;
    weight->out_dtype = DTYPE_FP32;
}

// Numbers between -0.5 and 0.5 in floatX, not zeros, which some processors multiply faster.
static inline char* bare_buffer(size_t bytes) {
    floatX* values = checked_malloc(bytes);
    for (size_t i = 0; i < bytes / sizeof(floatX); i++) {
        values[i] = to_floatX((float)(mix64(i) >> 40) * 0x1p-24f - 0.5f);
    }
    return (char*)values;
}

static inline BareProducts* bare_products_new(const GPT2Config* config, int N, int logits_rows) {
    BareProducts* bare = checked_calloc(1, sizeof *bare);
    const int C = config->C, L = config->L, Vp = gpt2_padded_vocab(config);
    const int chunk = N < logits_rows ? N : logits_rows;
    const int shapes[NUM_WEIGHTS][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}, {C, Vp}};
    DNNLCHECK(dnnl_engine_create(&bare->engine, dnnl_cpu, 0));
    DNNLCHECK(dnnl_stream_create(&bare->stream, bare->engine, dnnl_stream_default_flags));
    size_t scratch_bytes = 64;
    for (int w = 0; w < NUM_WEIGHTS; w++) {
        const bool head = w == NUM_WEIGHTS - 1;
        BareProduct* products = &bare->products[3 * w];
        bare_describe(products, shapes[w][0], shapes[w][1], head ? chunk : N,
                      (size_t)(head ? logits_rows : N), head ? (N + chunk - 1) / chunk : L, head);
        for (int i = 0; i < 3; i++) {
            scratch_bytes = max_size(scratch_bytes, bare_create(bare, &products[i]));
        }
    }
    bare->weight_elems = (size_t)C * (size_t)Vp;
    const size_t rows =
        max_size((size_t)N * (size_t)(4 * C + 64), (size_t)chunk * (size_t)(Vp + 64));
    const size_t sizes[NUM_BUFFERS] = {rows * sizeof(floatX), rows * sizeof(floatX),
                                       bare->weight_elems * sizeof(floatX),
                                       bare->weight_elems * sizeof(float)};
    for (int i = 0; i < NUM_BUFFERS; i++) bare->buffers[i] = bare_buffer(sizes[i]);
    bare->scratch = checked_malloc(scratch_bytes);
    return bare;
}

static inline void bare_products_free(BareProducts* bare) {
    for (int p = 0; p < NUM_PRODUCTS; p++) {
        BareProduct* product = &bare->products[p];
        DNNLCHECK(dnnl_primitive_destroy(product->primitive));
        DNNLCHECK(dnnl_memory_destroy(product->a));
        DNNLCHECK(dnnl_memory_destroy(product->b));
        DNNLCHECK(dnnl_memory_destroy(product->out));
        DNNLCHECK(dnnl_memory_destroy(product->scratch));
    }
    for (int i = 0; i < NUM_BUFFERS; i++) free(bare->buffers[i]);
    free(bare->scratch);
    DNNLCHECK(dnnl_stream_destroy(bare->stream));
    DNNLCHECK(dnnl_engine_destroy(bare->engine));
    free(bare);
}

// Seconds of one product. Each repeat uses other weights.
static inline double bare_run(BareProducts* bare, BareProduct* product, int repeat) {
    const ProductKey* key = &product->key;
    const int kind = product->kind % 3;
    const size_t elems = (size_t)(kind == BARE_FORWARD ? key->N * (long)key->K
                                  : kind == BARE_INPUT ? key->N * (long)key->K
                                                       : key->M * (long)key->N);
    const size_t room = bare->weight_elems - elems;
    const size_t offset = room > 0 ? (size_t)repeat * elems % (room + 1) / 64 * 64 : 0;
    char* weight = bare->buffers[BUFFER_WEIGHT] + offset * sizeof(floatX);
    char* grad = bare->buffers[BUFFER_GRAD] + offset * sizeof(float);
    char *in = bare->buffers[BUFFER_IN], *out = bare->buffers[BUFFER_OUT];
    void* handles[4] = {in, weight, out, bare->scratch};
    if (kind == BARE_WEIGHT) handles[1] = out, handles[2] = grad;
    const dnnl_memory_t memories[4] = {product->a, product->b, product->out, product->scratch};
    for (int i = 0; i < 4; i++) DNNLCHECK(dnnl_memory_set_data_handle(memories[i], handles[i]));
    const dnnl_exec_arg_t args[4] = {{DNNL_ARG_SRC, product->a},
                                     {DNNL_ARG_WEIGHTS, product->b},
                                     {DNNL_ARG_DST, product->out},
                                     {DNNL_ARG_SCRATCHPAD, product->scratch}};
    const double begin = now_seconds();
    DNNLCHECK(dnnl_primitive_execute(product->primitive, bare->stream, 4, args));
    DNNLCHECK(dnnl_stream_wait(bare->stream));
    return now_seconds() - begin;
}

static inline void bare_products_run(BareProducts* bare, BareTimes* best) {
    BareTimes now = {0};
    for (int p = 0; p < NUM_PRODUCTS; p++) {
        BareProduct* product = &bare->products[p];
        const double flops = 2.0 * product->key.M * product->key.N * product->key.K;
        double sum = 0;
        for (int i = 0; i < product->repeats; i++) {
            const double seconds = bare_run(bare, product, i);
            sum += seconds;
            best->burst_flops = fmax(best->burst_flops, flops / seconds);
        }
        now.kinds[product->kind] += sum;
        now.kind_flops[product->kind] += product->repeats * flops;
        best->peak_flops = fmax(best->peak_flops, product->repeats * flops / sum);
    }
    for (int k = 0; k < NUM_BARE_KINDS; k++) {
        now.total += now.kinds[k];
        now.flops += now.kind_flops[k];
    }
    if (now.total >= best->total) return;
    now.peak_flops = best->peak_flops, now.burst_flops = best->burst_flops;
    *best = now;
}

#endif
