// gpt2/forward.c - the forward pass, one unit at a time.
//
// A block ends with its last projection in `branch`, not yet added to the residual: the LayerNorm
// that comes next, in the block above or before the head, adds it while it reads. So every residual
// addition is fused with a LayerNorm and no unit needs the weights of another.
#include "gpt2/gpt2.h"

static const Rows no_rows = {NULL, 0};

static Rows rows_from(Rows rows, size_t first) {
    rows.ptr += first * rows.ld;
    return rows;
}

// Which positions of which sequence a pass covers: B whole sequences from position 0, or n new
// tokens of one cached sequence.
typedef struct {
    int B, T;
    floatX *k_cache, *v_cache; // of this layer; NULL: no cache
    int first_pos;
} Pass;

// residual1 = a + b and everything above it, up to the branch.
static void block_forward(const GPT2* model, const floatX* block, const BlockActs* acts, Rows a,
                          Rows b, Pass pass, bool with_branch) {
    int C = model->config.C, NH = model->config.NH, N = pass.B * pass.T;
    layernorm_forward(acts->ln1, acts->ln1_mean, acts->ln1_rstd, acts->residual1, a, b,
                      block + model->at.ln1_w, block + model->at.ln1_b, N, C);
    matmul_forward(acts->qkv, no_rows, acts->ln1, block + model->at.qkv_w, WEIGHT_IN_OUT,
                   block + model->at.qkv_b, N, C, 3 * C);
    if (pass.k_cache)
        attention_cached(acts->att, acts->qkv, pass.k_cache, pass.v_cache, pass.first_pos, N, C,
                         NH);
    else
        attention_forward(acts->att, acts->lse, acts->qkv, pass.B, pass.T, C, NH);
    matmul_forward(model->branch, no_rows, acts->att, block + model->at.proj_w, WEIGHT_IN_OUT,
                   block + model->at.proj_b, N, C, C);
    layernorm_forward(acts->ln2, acts->ln2_mean, acts->ln2_rstd, acts->residual2, acts->residual1,
                      model->branch, block + model->at.ln2_w, block + model->at.ln2_b, N, C);
    matmul_forward(acts->gelu, acts->fc, acts->ln2, block + model->at.fc_w, WEIGHT_IN_OUT,
                   block + model->at.fc_b, N, C, 4 * C);
    if (with_branch)
        matmul_forward(model->branch, no_rows, acts->gelu, block + model->at.fcproj_w,
                       WEIGHT_IN_OUT, block + model->at.fcproj_b, N, 4 * C, C);
}

// ---- training and evaluation --------------------------------------------------------------------

void gpt2_embed_forward(GPT2* model, const floatX* embedding, const int* tokens, int B, int T) {
    embedding_forward(model->blocks[0].residual1, tokens, embedding + model->at.wte,
                      embedding + model->at.wpe, 0, B, T, model->config.C);
}

void gpt2_block_forward(GPT2* model, const floatX* block, int l, int B, int T) {
    BlockActs* acts = &model->blocks[l];
    Pass pass = {B, T, NULL, NULL, 0};
    Rows a = l == 0 ? acts->residual1 : model->blocks[l - 1].residual2;
    block_forward(model, block, acts, a, l == 0 ? no_rows : model->branch, pass, true);
}

void gpt2_block_recompute(GPT2* model, const floatX* block, int l, int B, int T) {
    BlockActs* acts = &model->blocks[l];
    int C = model->config.C, N = B * T;
    Pass pass = {B, T, NULL, NULL, 0};
    switch (model->shape.recompute) {
    case RECOMPUTE_NONE:
        break;
    case RECOMPUTE_GELU_LAYERNORM:
        layernorm_forward(acts->ln1, acts->ln1_mean, acts->ln1_rstd, no_rows, acts->residual1,
                          no_rows, block + model->at.ln1_w, block + model->at.ln1_b, N, C);
        layernorm_forward(acts->ln2, acts->ln2_mean, acts->ln2_rstd, no_rows, acts->residual2,
                          no_rows, block + model->at.ln2_w, block + model->at.ln2_b, N, C);
        // fall through
    case RECOMPUTE_GELU:
        gelu_forward(acts->gelu, acts->fc, N, 4 * C);
        break;
    case RECOMPUTE_BLOCK:
        block_forward(model, block, acts, acts->residual1, no_rows, pass, false);
        break;
    }
}

// The final LayerNorm over rows whose residual still waits for its branch.
static void final_layernorm(GPT2* model, const floatX* embedding, const BlockActs* last, int N) {
    layernorm_forward(model->lnf, model->lnf_mean, model->lnf_rstd, model->residual_final,
                      last->residual2, model->branch, embedding + model->at.lnf_w,
                      embedding + model->at.lnf_b, N, model->config.C);
}

void gpt2_head_loss(GPT2* model, const floatX* embedding, const int* targets, float dloss,
                    Grad dembedding, int B, int T) {
    int C = model->config.C, V = model->config.V, Vp = gpt2_padded_vocab(&model->config), N = B * T;
    const floatX* wte = embedding + model->at.wte;
    bool backward = dloss != 0.0f;
    final_layernorm(model, embedding, &model->blocks[model->config.L - 1], N);
    Grad dwte = backward ? grad_at(dembedding, model->at.wte) : dembedding;
    for (int first = 0; first < N; first += LOGITS_ROWS) {
        int n = N - first < LOGITS_ROWS ? N - first : LOGITS_ROWS;
        Rows x = rows_from(model->lnf, (size_t)first);
        matmul_forward(model->logits, no_rows, x, wte, WEIGHT_OUT_IN, NULL, n, C, Vp);
        classifier_loss(model->losses + first, model->logits, targets + first, n, V, Vp, dloss,
                        backward);
        if (!backward) continue;
        Grad no_grad = {NULL, false, false};
        matmul_backward_input(rows_from(model->dbranch, (size_t)first), model->logits, wte,
                              WEIGHT_OUT_IN, no_rows, n, C, Vp);
        matmul_backward_weight(dwte, no_grad, x, model->logits, WEIGHT_OUT_IN, n, C, Vp);
        dwte.accumulate = true; // the first chunk of rows may write, the others add
    }
    if (backward)
        layernorm_backward(model->dresidual, no_rows, grad_at(dembedding, model->at.lnf_w),
                           grad_at(dembedding, model->at.lnf_b), model->dbranch,
                           model->residual_final, model->lnf_mean, model->lnf_rstd,
                           embedding + model->at.lnf_w, N, C);
}

// ---- generation with the key-value cache --------------------------------------------------------

// All blocks work in the buffers of block 0: nothing is kept for a backward pass.

void gpt2_cached_embed(GPT2* model, const floatX* embedding, const int* tokens, int first_pos,
                       int n) {
    embedding_forward(model->blocks[0].residual1, tokens, embedding + model->at.wte,
                      embedding + model->at.wpe, first_pos, 1, n, model->config.C);
}

void gpt2_cached_block(GPT2* model, const floatX* block, int l, int first_pos, int n) {
    BlockActs* acts = &model->blocks[0];
    size_t layer = (size_t)l * (size_t)model->shape.cache_T * (size_t)model->config.C;
    Pass pass = {1, n, model->k_cache + layer, model->v_cache + layer, first_pos};
    Rows a = l == 0 ? acts->residual1 : acts->residual2;
    block_forward(model, block, acts, a, l == 0 ? no_rows : model->branch, pass, true);
}

void gpt2_cached_logits(GPT2* model, const floatX* embedding, int n) {
    int C = model->config.C, Vp = gpt2_padded_vocab(&model->config);
    final_layernorm(model, embedding, &model->blocks[0], n);
    matmul_forward(model->logits, no_rows, rows_from(model->lnf, (size_t)(n - 1)),
                   embedding + model->at.wte, WEIGHT_OUT_IN, NULL, 1, C, Vp);
}
