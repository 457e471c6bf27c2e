// gpt2/tensors.c - the tensors of GPT-2: names, shapes, order, units and initial values.
//
// The order is that of checkpoints. Names and [in, out] shapes are those of the published weights.
#include <math.h>
#include <stdio.h>

#include "core/check.h"
#include "core/rng.h"
#include "gpt2/gpt2.h"

// Appends one tensor to the table and to its unit. stored_rows >= rows leaves room for padding
// rows.
static void add(ParamTable* table, int unit, const char* name, int num_dims, size_t rows,
                size_t cols, size_t stored_rows, float mean, float std) {
    TensorSpec* t = &table->tensors[table->num_tensors++];
    snprintf(t->name, sizeof(t->name), "%s", name);
    t->num_dims = num_dims;
    t->shape[0] = rows;
    t->shape[1] = cols;
    t->elems = rows * cols;
    t->canonical_offset = table->num_params;
    t->unit = unit;
    t->unit_offset = table->unit_elems[unit];
    t->decay = num_dims == 2;
    t->init_mean = mean;
    t->init_std = std;
    table->num_params += t->elems;
    table->unit_elems[unit] += round_up(stored_rows * cols, PARAM_ALIGN);
}

static void add_matrix(ParamTable* table, int unit, const char* name, size_t rows, size_t cols,
                       size_t stored_rows, float std) {
    add(table, unit, name, 2, rows, cols, stored_rows, 0.0f, std);
}

static void add_vector(ParamTable* table, int unit, const char* name, size_t n, float value) {
    add(table, unit, name, 1, n, 1, n, value, 0.0f);
}

static const char* block_name(char* buffer, size_t size, int l, const char* tensor) {
    snprintf(buffer, size, "h.%d.%s", l, tensor);
    return buffer;
}

void gpt2_param_table(ParamTable* table, const GPT2Config* config) {
    size_t C = (size_t)config->C, V = (size_t)config->V, T = (size_t)config->T;
    int L = config->L;
    table->num_tensors = 0;
    table->num_params = 0;
    table->num_units = 1 + L;
    table->tensors = (TensorSpec*)checked_calloc(12 * (size_t)L + 4, sizeof(TensorSpec));
    table->unit_elems = (size_t*)checked_calloc((size_t)L + 1, sizeof(size_t));

    // 0.02 and the 1/sqrt(2L) of residual projections: Radford et al. 2019, section 2.3, and the
    // published code.
    float std = 0.02f, projection_std = (float)(0.02 / sqrt(2.0 * L));
    char n[40];
    add_matrix(table, UNIT_EMBEDDING, "wte.weight", V, C, (size_t)gpt2_padded_vocab(config), std);
    add_matrix(table, UNIT_EMBEDDING, "wpe.weight", T, C, T, std);
    for (int l = 0; l < L; l++) {
        int u = unit_block(l);
        add_vector(table, u, block_name(n, sizeof(n), l, "ln_1.weight"), C, 1.0f);
        add_vector(table, u, block_name(n, sizeof(n), l, "ln_1.bias"), C, 0.0f);
        add_matrix(table, u, block_name(n, sizeof(n), l, "attn.c_attn.weight"), C, 3 * C, C, std);
        add_vector(table, u, block_name(n, sizeof(n), l, "attn.c_attn.bias"), 3 * C, 0.0f);
        add_matrix(table, u, block_name(n, sizeof(n), l, "attn.c_proj.weight"), C, C, C,
                   projection_std);
        add_vector(table, u, block_name(n, sizeof(n), l, "attn.c_proj.bias"), C, 0.0f);
        add_vector(table, u, block_name(n, sizeof(n), l, "ln_2.weight"), C, 1.0f);
        add_vector(table, u, block_name(n, sizeof(n), l, "ln_2.bias"), C, 0.0f);
        add_matrix(table, u, block_name(n, sizeof(n), l, "mlp.c_fc.weight"), C, 4 * C, C, std);
        add_vector(table, u, block_name(n, sizeof(n), l, "mlp.c_fc.bias"), 4 * C, 0.0f);
        add_matrix(table, u, block_name(n, sizeof(n), l, "mlp.c_proj.weight"), 4 * C, C, 4 * C,
                   projection_std);
        add_vector(table, u, block_name(n, sizeof(n), l, "mlp.c_proj.bias"), C, 0.0f);
    }
    add_vector(table, UNIT_EMBEDDING, "ln_f.weight", C, 1.0f);
    add_vector(table, UNIT_EMBEDDING, "ln_f.bias", C, 0.0f);
}

void gpt2_init_range(float* out, const ParamTable* table, int tensor, size_t first, size_t count,
                     uint64_t seed) {
    const TensorSpec* t = &table->tensors[tensor];
    CHECK(first + count <= t->elems, "%s has %zu elements, not %zu", t->name, t->elems,
          first + count);
    double mean = (double)t->init_mean, std = (double)t->init_std;
    if (t->init_std == 0.0f) {
        for (size_t i = 0; i < count; i++) out[i] = t->init_mean;
        return;
    }
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < count; i++) {
        out[i] = (float)(mean + std * rng_normal(seed, RNG_INIT + (uint64_t)tensor, first + i));
    }
}
