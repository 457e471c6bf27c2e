// dev/test/oracle.h - what every operation of backend/ops.h means, in plain double arithmetic.
//
// No blocking, no online sums, no shortcuts: each function is its formula, written once more,
// independently of the backends. All arrays are dense and in memory order as stated (no row
// strides); N = B * T rows. Functions that return weight gradients or gradients of a stream of
// residuals add to what the array holds (`+=`), so that each Grad mode is a matter of what the
// caller puts there. test_oracle.c checks each backward by finite differences of its forward.
#ifndef DEV_TEST_ORACLE_H
#define DEV_TEST_ORACLE_H

#include "backend/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

// out[b,t,:] = wte[tokens[b,t],:] + wpe[first_pos + t,:]
//   out (B, T, C)   tokens (B, T)   wte (V, C)   wpe (maxT, C)
void oracle_embedding_forward(double* out, const int* tokens, const double* wte, const double* wpe,
                              int first_pos, int B, int T, int C);
// dwte (V, C) +=   dwpe (maxT, C) +=   dout (B, T, C), for first_pos = 0
void oracle_embedding_backward(double* dwte, double* dwpe, const double* dout, const int* tokens,
                               int B, int T, int C);

// out = (inp - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + 1e-5), variance over C (not
// C - 1).   out, inp (N, C)   mean, rstd (N)   weight, bias (C)
void oracle_layernorm_forward(double* out, double* mean, double* rstd, const double* inp,
                              const double* weight, const double* bias, int N, int C);
// dinp (N, C) +=   dweight, dbias (C) +=
void oracle_layernorm_backward(double* dinp, double* dweight, double* dbias, const double* dout,
                               const double* inp, const double* weight, int N, int C);

// out = in * W + bias (bias NULL: none).
//   out (N, OC)   in (N, C)   weight (C, OC) or (OC, C)   bias (OC)
void oracle_matmul_forward(double* out, const double* in, const double* weight, WeightLayout layout,
                           const double* bias, int N, int C, int OC);
// din (N, C) =   dweight (as weight) +=   dbias (OC) +=
void oracle_matmul_backward(double* din, double* dweight, double* dbias, const double* dout,
                            const double* in, const double* weight, WeightLayout layout, int N,
                            int C, int OC);

// out[i] = gelu(in[i]), tanh form; din[i] = dout[i] * gelu'(in[i]).
void oracle_gelu_forward(double* out, const double* in, size_t count);
void oracle_gelu_backward(double* din, const double* dout, const double* in, size_t count);

// Causal self-attention with the whole row of scores. out (B, T, C)   lse (B, NH, T)
//   qkv (B, T, 3, NH, HS)
void oracle_attention_forward(double* out, double* lse, const double* qkv, int B, int T, int C,
                              int NH);
// dqkv (B, T, 3, NH, HS) =
void oracle_attention_backward(double* dqkv, const double* dout, const double* qkv, int B, int T,
                               int C, int NH);

// losses (N) =   dlogits (N, Vp) =   logits (N, Vp), of which V count   targets (N), -1: masked
void oracle_classifier(double* losses, double* dlogits, const double* logits, const int* targets,
                       int N, int V, int Vp, double dloss);

// One AdamW step over `count` elements of one tensor.
void oracle_adamw(double* master, double* m, double* v, const double* grad, size_t count,
                  bool decay, const AdamW* adamw);

#ifdef __cplusplus
}
#endif
#endif
