// gpt2/backward.c - the backward pass, one unit at a time.
//
// `dresidual` is the gradient of the residual stream. It enters a block as the gradient of the
// block's output; each LayerNorm backward adds the branch's part to it; it leaves as the gradient
// of the block's input. Since output = residual + branch, it is also the gradient of each branch's
// end.
#include "gpt2/gpt2.h"

static const Rows no_rows = {NULL, 0};

void gpt2_block_backward(GPT2* model, const floatX* block, int l, Grad g, int B, int T) {
    const BlockActs* acts = &model->blocks[l];
    int C = model->config.C, NH = model->config.NH, N = B * T;
    Rows dresidual = model->dresidual, dbranch = model->dbranch, dfc = model->dwide,
         dqkv = model->dwide;
    gpt2_block_recompute(model, block, l, B, T);

    // MLP: residual2 -> ln2 -> fc -> gelu -> fcproj
    matmul_backward_weight(grad_at(g, model->at.fcproj_w), grad_at(g, model->at.fcproj_b),
                           acts->gelu, dresidual, WEIGHT_IN_OUT, N, 4 * C, C);
    matmul_backward_input(dfc, dresidual, block + model->at.fcproj_w, WEIGHT_IN_OUT, acts->fc, N,
                          4 * C, C);
    matmul_backward_weight(grad_at(g, model->at.fc_w), grad_at(g, model->at.fc_b), acts->ln2, dfc,
                           WEIGHT_IN_OUT, N, C, 4 * C);
    matmul_backward_input(dbranch, dfc, block + model->at.fc_w, WEIGHT_IN_OUT, no_rows, N, C,
                          4 * C);
    layernorm_backward(dresidual, dresidual, grad_at(g, model->at.ln2_w),
                       grad_at(g, model->at.ln2_b), dbranch, acts->residual2, acts->ln2_mean,
                       acts->ln2_rstd, block + model->at.ln2_w, N, C);

    // Attention: residual1 -> ln1 -> qkv -> att -> proj
    matmul_backward_weight(grad_at(g, model->at.proj_w), grad_at(g, model->at.proj_b), acts->att,
                           dresidual, WEIGHT_IN_OUT, N, C, C);
    matmul_backward_input(dbranch, dresidual, block + model->at.proj_w, WEIGHT_IN_OUT, no_rows, N,
                          C, C);
    attention_backward(dqkv, dbranch, acts->qkv, acts->att, acts->lse, B, T, C, NH);
    matmul_backward_weight(grad_at(g, model->at.qkv_w), grad_at(g, model->at.qkv_b), acts->ln1,
                           dqkv, WEIGHT_IN_OUT, N, C, 3 * C);
    matmul_backward_input(dbranch, dqkv, block + model->at.qkv_w, WEIGHT_IN_OUT, no_rows, N, C,
                          3 * C);
    layernorm_backward(dresidual, dresidual, grad_at(g, model->at.ln1_w),
                       grad_at(g, model->at.ln1_b), dbranch, acts->residual1, acts->ln1_mean,
                       acts->ln1_rstd, block + model->at.ln1_w, N, C);
}

void gpt2_embed_backward(GPT2* model, Grad g, const int* tokens, int B, int T) {
    embedding_backward(grad_at(g, model->at.wte), grad_at(g, model->at.wpe), model->dresidual,
                       tokens, B, T, model->config.C, model->config.T, model->config.V);
}
