// backend/cpu/onednn.h - matrix products of oneDNN 2.x and 3.x: the calls that differ between the
// major versions, in one place.
#ifndef BACKEND_CPU_ONEDNN_H
#define BACKEND_CPU_ONEDNN_H

#include <oneapi/dnnl/dnnl.h>

#include "backend/ops.h"

#define DNNLCHECK(call)                                                                            \
    do {                                                                                           \
        dnnl_status_t status_ = (call);                                                            \
        CHECK(status_ == dnnl_success, "%s: oneDNN status %d", #call, (int)status_);               \
    } while (0)

// Everything a primitive is made for: out (M, N) = or += a (M, K) * b (K, N) + bias (N). Compared
// as bytes, so clear it with memset before filling it.
typedef struct {
    int M, N, K;
    DType in_dtype, out_dtype;
    int has_bias, accumulate;
    size_t a_row, a_col, b_row, b_col, out_ld;
} ProductKey;

static inline dnnl_data_type_t dnnl_type(DType dtype) {
    return dtype == DTYPE_FP32 ? dnnl_f32 : dtype == DTYPE_BF16 ? dnnl_bf16 : dnnl_f16;
}

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t Layout;
typedef const_dnnl_memory_desc_t LayoutArg;
static inline LayoutArg layout_arg(const Layout* layout) { return *layout; }
static inline void layout_init(Layout* layout, DType dtype, int rows, int cols, size_t row,
                               size_t col) {
    DNNLCHECK(
        dnnl_memory_desc_create_with_strides(layout, 2, (dnnl_dims_t){rows, cols}, dnnl_type(dtype),
                                             (dnnl_dims_t){(dnnl_dim_t)row, (dnnl_dim_t)col}));
}
static inline void layout_free(Layout* layout) { dnnl_memory_desc_destroy(*layout); }
#else
typedef dnnl_memory_desc_t Layout;
typedef const dnnl_memory_desc_t* LayoutArg;
static inline LayoutArg layout_arg(const Layout* layout) { return layout; }
static inline void layout_init(Layout* layout, DType dtype, int rows, int cols, size_t row,
                               size_t col) {
    DNNLCHECK(dnnl_memory_desc_init_by_strides(layout, 2, (dnnl_dims_t){rows, cols},
                                               dnnl_type(dtype),
                                               (dnnl_dims_t){(dnnl_dim_t)row, (dnnl_dim_t)col}));
}
static inline void layout_free(Layout* layout) { (void)layout; }
#endif

// Descriptions of the four matrices; bias is one of in_dtype and not used without has_bias.
typedef struct {
    Layout a, b, bias, out;
} Layouts;

static inline void layouts_init(Layouts* layouts, const ProductKey* key) {
    layout_init(&layouts->a, key->in_dtype, key->M, key->K, key->a_row, key->a_col);
    layout_init(&layouts->b, key->in_dtype, key->K, key->N, key->b_row, key->b_col);
    layout_init(&layouts->bias, key->in_dtype, 1, key->N, (size_t)key->N, 1);
    layout_init(&layouts->out, key->out_dtype, key->M, key->N, key->out_ld, 1);
}

static inline void layouts_free(Layouts* layouts) {
    layout_free(&layouts->a);
    layout_free(&layouts->b);
    layout_free(&layouts->bias);
    layout_free(&layouts->out);
}

// Not dnnl_success where the library has no such product.
static inline dnnl_status_t create_description(dnnl_primitive_desc_t* description,
                                               dnnl_engine_t engine, const Layouts* layouts,
                                               const ProductKey* key,
                                               dnnl_scratchpad_mode_t scratchpad_mode) {
    dnnl_post_ops_t post_ops;
    dnnl_primitive_attr_t attributes;
    DNNLCHECK(dnnl_post_ops_create(&post_ops));
    DNNLCHECK(dnnl_primitive_attr_create(&attributes));
    DNNLCHECK(dnnl_primitive_attr_set_scratchpad_mode(attributes, scratchpad_mode));
    LayoutArg bias = key->has_bias ? layout_arg(&layouts->bias) : NULL;
#if DNNL_VERSION_MAJOR >= 3
    if (key->accumulate) {
        DNNLCHECK(dnnl_post_ops_append_sum(post_ops, 1.0f, 0, dnnl_data_type_undef));
    }
    DNNLCHECK(dnnl_primitive_attr_set_post_ops(attributes, post_ops));
    dnnl_status_t status = dnnl_matmul_primitive_desc_create(
        description, engine, layout_arg(&layouts->a), layout_arg(&layouts->b), bias,
        layout_arg(&layouts->out), attributes);
#else
    if (key->accumulate) DNNLCHECK(dnnl_post_ops_append_sum(post_ops, 1.0f));
    DNNLCHECK(dnnl_primitive_attr_set_post_ops(attributes, post_ops));
    dnnl_matmul_desc_t matmul;
    dnnl_status_t status = dnnl_matmul_desc_init(
        &matmul, layout_arg(&layouts->a), layout_arg(&layouts->b), bias, layout_arg(&layouts->out));
    if (status == dnnl_success) {
        status = dnnl_primitive_desc_create(description, &matmul, attributes, engine, NULL);
    }
#endif
    DNNLCHECK(dnnl_primitive_attr_destroy(attributes));
    DNNLCHECK(dnnl_post_ops_destroy(post_ops));
    return status;
}

static inline LayoutArg scratchpad_layout(const_dnnl_primitive_desc_t description) {
    return dnnl_primitive_desc_query_md(description, dnnl_query_scratchpad_md, 0);
}

#endif
