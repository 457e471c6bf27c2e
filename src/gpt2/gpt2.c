// gpt2/gpt2.c - the memory of one model: which activations exist, and where.
//
// One function lays everything out; with no base pointer it only counts, so that the plan and the
// allocation cannot differ. Per block, in elements of floatX, with N = B*T:
//
//   residual1 C | ln1 C | qkv 3C | att C | residual2 C | ln2 C | fc 4C | gelu 4C   = 16 N C
//   lse B*NH*T floats, four statistics of N floats
//
// A recompute level lets all blocks share one copy of what it leaves out (backward.c fills it
// again):
//   RECOMPUTE_GELU            gelu
//   RECOMPUTE_GELU_LAYERNORM  gelu, ln1, ln2
//   RECOMPUTE_BLOCK           all but residual1
//
// Source of the idea: Chen et al. 2016, arXiv:1604.06174.
#include "gpt2/gpt2.h"

#include <stdlib.h>
#include <string.h>

// ---- layout -------------------------------------------------------------------------------------

// Hands out consecutive pieces; with base NULL it only counts.
typedef struct {
    char* base;
    size_t used;
} Arena;

static void* take(Arena* arena, size_t bytes) {
    void* p = arena->base ? arena->base + arena->used : NULL;
    arena->used += round_up(bytes, 256);
    return p;
}

static Rows take_rows(Arena* arena, size_t N, size_t cols) {
    Rows rows;
    rows.ld = ops_row_stride(N, cols);
    rows.ptr = (floatX*)take(arena, N * rows.ld * sizeof(floatX));
    return rows;
}

static float* take_floats(Arena* arena, size_t n) { return (float*)take(arena, n * sizeof(float)); }

static size_t shape_rows(const GPT2Shape* s) { return (size_t)s->B * (size_t)s->T; }

// What block l keeps for itself; the rest it takes from `shared`, the block before it.
static void lay_out_block(Arena* arena, BlockActs* block, const BlockActs* shared,
                          const GPT2* model) {
    size_t N = shape_rows(&model->shape), C = (size_t)model->config.C;
    Recompute level = model->shape.backward ? model->shape.recompute : RECOMPUTE_BLOCK;
    bool own_gelu = !shared || level < RECOMPUTE_GELU;
    bool own_layernorm = !shared || level < RECOMPUTE_GELU_LAYERNORM;
    bool own_rest = !shared || level < RECOMPUTE_BLOCK;
    if (shared) *block = *shared;
    if (!shared || model->shape.backward) block->residual1 = take_rows(arena, N, C);
    if (own_layernorm) {
        block->ln1 = take_rows(arena, N, C);
        block->ln2 = take_rows(arena, N, C);
    }
    if (own_rest) {
        block->qkv = take_rows(arena, N, 3 * C);
        block->att = take_rows(arena, N, C);
        block->residual2 = take_rows(arena, N, C);
        block->fc = take_rows(arena, N, 4 * C);
        block->lse = take_floats(arena, N * (size_t)model->config.NH);
        block->ln1_mean = take_floats(arena, N);
        block->ln1_rstd = take_floats(arena, N);
        block->ln2_mean = take_floats(arena, N);
        block->ln2_rstd = take_floats(arena, N);
    }
    if (own_gelu) block->gelu = take_rows(arena, N, 4 * C);
}

static size_t lay_out_activations(GPT2* model, void* base) {
    Arena arena = {(char*)base, 0};
    size_t N = shape_rows(&model->shape), C = (size_t)model->config.C;
    for (int l = 0; l < model->config.L; l++) {
        lay_out_block(&arena, &model->blocks[l], l > 0 ? &model->blocks[l - 1] : NULL, model);
    }
    model->branch = take_rows(&arena, N, C);
    model->residual_final = take_rows(&arena, N, C);
    model->lnf = take_rows(&arena, N, C);
    model->lnf_mean = take_floats(&arena, N);
    model->lnf_rstd = take_floats(&arena, N);
    model->losses = take_floats(&arena, N);
    return arena.used;
}

static size_t lay_out_activation_grads(GPT2* model, void* base) {
    Arena arena = {(char*)base, 0};
    size_t N = shape_rows(&model->shape), C = (size_t)model->config.C;
    if (!model->shape.backward) return 0;
    model->dresidual = take_rows(&arena, N, C);
    model->dbranch = take_rows(&arena, N, C);
    model->dwide = take_rows(&arena, N, 4 * C);
    return arena.used;
}

static size_t lay_out_logits(GPT2* model, void* base) {
    Arena arena = {(char*)base, 0};
    size_t rows = min_size(shape_rows(&model->shape), LOGITS_ROWS);
    model->logits = take_rows(&arena, rows, (size_t)gpt2_padded_vocab(&model->config));
    return arena.used;
}

static size_t lay_out_cache(GPT2* model, void* base) {
    Arena arena = {(char*)base, 0};
    size_t elems = (size_t)model->config.L * (size_t)model->shape.cache_T * (size_t)model->config.C;
    if (elems == 0) return 0;
    model->k_cache = (floatX*)take(&arena, elems * sizeof(floatX));
    model->v_cache = (floatX*)take(&arena, elems * sizeof(floatX));
    return arena.used;
}

// ---- life ---------------------------------------------------------------------------------------

static size_t offset_of(const ParamTable* table, const char* name) {
    int t = param_find(table, name);
    CHECK(t >= 0, "no tensor %s", name);
    return table->tensors[t].unit_offset;
}

void gpt2_init(GPT2* model, const GPT2Config* config, const GPT2Shape* shape) {
    memset(model, 0, sizeof(*model));
    model->config = *config;
    model->shape = *shape;
    gpt2_param_table(&model->table, config);
    const ParamTable* t = &model->table;
    model->at.wte = offset_of(t, "wte.weight");
    model->at.wpe = offset_of(t, "wpe.weight");
    model->at.lnf_w = offset_of(t, "ln_f.weight");
    model->at.lnf_b = offset_of(t, "ln_f.bias");
    model->at.ln1_w = offset_of(t, "h.0.ln_1.weight");
    model->at.ln1_b = offset_of(t, "h.0.ln_1.bias");
    model->at.qkv_w = offset_of(t, "h.0.attn.c_attn.weight");
    model->at.qkv_b = offset_of(t, "h.0.attn.c_attn.bias");
    model->at.proj_w = offset_of(t, "h.0.attn.c_proj.weight");
    model->at.proj_b = offset_of(t, "h.0.attn.c_proj.bias");
    model->at.ln2_w = offset_of(t, "h.0.ln_2.weight");
    model->at.ln2_b = offset_of(t, "h.0.ln_2.bias");
    model->at.fc_w = offset_of(t, "h.0.mlp.c_fc.weight");
    model->at.fc_b = offset_of(t, "h.0.mlp.c_fc.bias");
    model->at.fcproj_w = offset_of(t, "h.0.mlp.c_proj.weight");
    model->at.fcproj_b = offset_of(t, "h.0.mlp.c_proj.bias");
    model->blocks = (BlockActs*)checked_calloc((size_t)config->L, sizeof(BlockActs));
}

void gpt2_plan(GPT2* model, Ledger* ledger) {
    ledger_add(ledger, MEM_TRANSIENT, "activations", lay_out_activations(model, NULL));
    ledger_add(ledger, MEM_TRANSIENT, "activation_grads", lay_out_activation_grads(model, NULL));
    ledger_add(ledger, MEM_TRANSIENT, "logits", lay_out_logits(model, NULL));
    ledger_add(ledger, MEM_TRANSIENT, "kv_cache", lay_out_cache(model, NULL));
}

void gpt2_alloc(GPT2* model, Ledger* ledger) {
    lay_out_activations(model, device_alloc(ledger, "activations"));
    lay_out_activation_grads(model, device_alloc(ledger, "activation_grads"));
    lay_out_logits(model, device_alloc(ledger, "logits"));
    lay_out_cache(model, device_alloc(ledger, "kv_cache"));
}

void gpt2_free(GPT2* model) {
    free(model->blocks);
    param_table_free(&model->table);
    memset(model, 0, sizeof(*model));
}
