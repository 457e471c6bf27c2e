// core/params.h - the tensor table: every parameter tensor of a model by name, shape and place.
//
// gpt2/ fills it; zero/ cuts it into shards; the checkpoint writes it. It is the one place where
// the order of the tensors is known.
//
// A *unit* is what ZeRO moves at once: unit 0 is E = {wte, wpe, ln_f}, unit 1 + l is block l.
// Inside a unit each tensor starts at a multiple of PARAM_ALIGN elements. Gaps between tensors, and
// the rows of wte from V to Vp, are padding: zero, never stored, never part of norm or update.
#ifndef CORE_PARAMS_H
#define CORE_PARAMS_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { PARAM_ALIGN = 64 }; // elements: a cache line of fp32 times four; 128 bytes of bf16

typedef struct {
    char name[40];           // as in model.safetensors: "h.3.attn.c_attn.weight"
    int num_dims;            // 1 or 2
    size_t shape[2];         // published shape; shape[1] = 1 for vectors
    size_t elems;            // product of the shape: what is stored, counted and updated
    size_t canonical_offset; // elements of all tensors before it in table order, without padding
    int unit;                // 0 = E, 1 + l = block l
    size_t unit_offset;      // its first element inside the unit
    bool decay;              // 2-D tensors decay
    float init_mean;         // 1 for LayerNorm weights, else 0
    float init_std;          // 0 for vectors
} TensorSpec;

// Tensors stand in the order of checkpoints: wte, wpe, per layer ln_1, attn.c_attn, attn.c_proj,
// ln_2, mlp.c_fc, mlp.c_proj (each weight, bias), ln_f.
typedef struct {
    TensorSpec* tensors; // (num_tensors)
    int num_tensors;
    int num_units;
    size_t* unit_elems; // (num_units) elements with inner padding, a multiple of PARAM_ALIGN
    size_t num_params;  // elements without any padding
} ParamTable;

// The tensor of that name, or -1.
int param_find(const ParamTable* table, const char* name);
void param_table_free(ParamTable* table);

#ifdef __cplusplus
}
#endif
#endif
