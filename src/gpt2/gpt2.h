// gpt2/gpt2.h - GPT-2, one unit at a time: shapes and mathematics, no ranks and no stages.
//
// Exactly the published model as `transformers` computes it: pre-LayerNorm, learned positions, tanh
// GELU, head tied to wte, eps 1e-5, weights in the published [in, out] layout. A caller hands in
// the weights of one unit and where its gradients go; train/step.c strings the units together.
//
// Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
#ifndef GPT2_GPT2_H
#define GPT2_GPT2_H

#include "backend/ops.h"
#include "core/ledger.h"
#include "core/params.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- configuration ------------------------------------------------------------------------------

typedef struct {
    int L;  // layers
    int NH; // heads; divides C
    int C;  // channels
    int V;  // vocabulary
    int T;  // longest sequence
} GPT2Config;

static inline int gpt2_padded_vocab(const GPT2Config* c) { return (int)round_up((size_t)c->V, 64); }

// Reads a descriptor: dN, gpt2:dN, gpt3:cN (llm.c's tables), gpt2, gpt2-medium, gpt2-large,
// gpt2-xl, or L=2,NH=4,C=64[,V=257][,T=128]. V and T that the text leaves open become default_vocab
// and 1024. False with `error` set: not a descriptor, or an impossible one (code 2).
// `is_descriptor`, if not NULL, says whether the text has the form of one at all.
bool gpt2_config_parse(GPT2Config* config, const char* text, int default_vocab, bool* is_descriptor,
                       Error* error);

// Checks a configuration from wherever it came: all >= 1, NH divides C, V within uint32 ids.
bool gpt2_config_check(const GPT2Config* config, const char* where, Error* error);

// ---- tensors ------------------------------------------------------------------------------------

enum { UNIT_EMBEDDING = 0 };
static inline int unit_block(int l) { return 1 + l; }

// Builds the table of config's tensors; free with param_table_free.
void gpt2_param_table(ParamTable* table, const GPT2Config* config);

// Elements [first, first + count) of a tensor's initial value: normal(0, 0.02), residual
// projections scaled by 1/sqrt(2L), LayerNorm weights 1, biases 0. Keyed by seed, tensor and
// element.
void gpt2_init_range(float* out, const ParamTable* table, int tensor, size_t first, size_t count,
                     uint64_t seed);

// ---- activations --------------------------------------------------------------------------------

enum { LOGITS_ROWS = 1024 }; // rows of logits that exist at once

// What backward computes again instead of keeping it.
typedef enum {
    RECOMPUTE_NONE,
    RECOMPUTE_GELU,
    RECOMPUTE_GELU_LAYERNORM,
    RECOMPUTE_BLOCK
} Recompute;

typedef struct {
    int B, T;            // micro-batch; training, evaluation and HellaSwag share the buffers
    Recompute recompute; // of training
    bool backward;       // false: no gradient buffers (generation only)
    int cache_T;         // positions of the key-value cache; 0: no generation
    int cache_rows;      // most new tokens in one gpt2_cached_* pass
} GPT2Shape;

// One block's activations. What a recompute level leaves out points into buffers shared by all
// blocks.
typedef struct {
    Rows residual1;             // (N, C)  input of the block; of block 0 the embedding
    Rows ln1;                   // (N, C)
    float *ln1_mean, *ln1_rstd; // (N)
    Rows qkv;                   // (N, 3C)
    Rows att;                   // (N, C)
    float* lse;                 // (B, NH, T)
    Rows residual2;             // (N, C)
    Rows ln2;                   // (N, C)
    float *ln2_mean, *ln2_rstd; // (N)
    Rows fc;                    // (N, 4C) before GELU
    Rows gelu;                  // (N, 4C)
} BlockActs;

typedef struct {
    GPT2Config config;
    GPT2Shape shape;
    ParamTable table;
    struct {
        size_t wte, wpe, lnf_w, lnf_b; // offsets inside unit E
        size_t ln1_w, ln1_b, qkv_w, qkv_b, proj_w, proj_b, ln2_w, ln2_b, fc_w, fc_b, fcproj_w,
            fcproj_b; // offsets inside every block
    } at;
    BlockActs* blocks;          // (L)
    Rows branch;                // (N, C)  last projection of a block, not yet added to its residual
    Rows residual_final, lnf;   // (N, C)
    float *lnf_mean, *lnf_rstd; // (N)
    Rows logits;                // (LOGITS_ROWS, Vp)
    float* losses;              // (B, T)
    Rows dresidual;             // (N, C)  gradient of the residual stream, flowing down
    Rows dbranch;               // (N, C)
    Rows dwide;                 // (N, 4C) gradient of fc, then of qkv
    floatX *k_cache, *v_cache;  // (L, cache_T, C)
} GPT2;

// Fills config, table and offsets. No device memory.
void gpt2_init(GPT2* model, const GPT2Config* config, const GPT2Shape* shape);
// Adds the lines "activations", "activation_grads", "logits", "kv_cache" to the plan.
void gpt2_plan(GPT2* model, Ledger* ledger);
// Takes the memory of those lines.
void gpt2_alloc(GPT2* model, Ledger* ledger);
void gpt2_free(GPT2* model);

// ---- one unit, training and evaluation ----------------------------------------------------------

// Weights of a unit are passed as the unit's full, gathered floatX buffer.
void gpt2_embed_forward(GPT2* model, const floatX* embedding, const int* tokens, int B, int T);
void gpt2_block_forward(GPT2* model, const floatX* block, int l, int B, int T);

// Final LayerNorm, logits, loss. Leaves losses (B, T). With dloss != 0 also the head's backward:
// writes the gradients of wte (head part) and ln_f into dembedding and dresidual for the last
// block.
void gpt2_head_loss(GPT2* model, const floatX* embedding, const int* targets, float dloss,
                    Grad dembedding, int B, int T);

// Fills again what the recompute level left out; gpt2_block_backward begins with it.
void gpt2_block_recompute(GPT2* model, const floatX* block, int l, int B, int T);
// Takes dresidual of the block's output, leaves that of its input; writes the block's gradients.
void gpt2_block_backward(GPT2* model, const floatX* block, int l, Grad dblock, int B, int T);

// Adds the embedding's part to wte's gradient and writes wpe's.
void gpt2_embed_backward(GPT2* model, Grad dembedding, const int* tokens, int B, int T);

// ---- one unit, generation with the key-value cache ----------------------------------------------

// n new tokens of one sequence at positions first_pos ...; the logits of the last one end in
// logits row 0.
void gpt2_cached_embed(GPT2* model, const floatX* embedding, const int* tokens, int first_pos,
                       int n);
void gpt2_cached_block(GPT2* model, const floatX* block, int l, int first_pos, int n);
void gpt2_cached_logits(GPT2* model, const floatX* embedding, int n);

// ---- accounting ---------------------------------------------------------------------------------

// FLOPs of one token, forward and backward: 6 for each of the 12 L C^2 + V C weights that multiply,
// and 6 L C T for attention (12 L C T halved, since it is causal). Recomputation does not count.
// Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Chowdhery et al. 2022,
// arXiv:2204.02311, appendix B.
double gpt2_flops_per_token(const GPT2Config* config, int T);

#ifdef __cplusplus
}
#endif
#endif
