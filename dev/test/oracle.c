// dev/test/oracle.c - the operations of backend/ops.h in naive double arithmetic.
#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include "testing.h"

// ---- embedding ----------------------------------------------------------------------------------

void oracle_embedding_forward(double* out, const int* tokens, const double* wte, const double* wpe,
                              int first_pos, int B, int T, int C) {
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) {
                size_t n = (size_t)b * T + t, token = (size_t)tokens[n],
                       pos = (size_t)(first_pos + t);
                out[n * C + c] = wte[token * C + c] + wpe[pos * C + c];
            }
}

void oracle_embedding_backward(double* dwte, double* dwpe, const double* dout, const int* tokens,
                               int B, int T, int C) {
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++)
            for (int c = 0; c < C; c++) {
                size_t n = (size_t)b * T + t;
                dwte[(size_t)tokens[n] * C + c] += dout[n * C + c];
                dwpe[(size_t)t * C + c] += dout[n * C + c];
            }
}

// ---- LayerNorm ----------------------------------------------------------------------------------

static void row_statistics(double* mean, double* rstd, const double* x, int C) {
    double sum = 0, squares = 0;
    for (int c = 0; c < C; c++) sum += x[c];
    *mean = sum / C;
    for (int c = 0; c < C; c++) squares += (x[c] - *mean) * (x[c] - *mean);
    *rstd = 1 / sqrt(squares / C + 1e-5);
}

void oracle_layernorm_forward(double* out, double* mean, double* rstd, const double* inp,
                              const double* weight, const double* bias, int N, int C) {
    for (int n = 0; n < N; n++) {
        const double* x = inp + (size_t)n * C;
        row_statistics(&mean[n], &rstd[n], x, C);
        for (int c = 0; c < C; c++)
            out[(size_t)n * C + c] = (x[c] - mean[n]) * rstd[n] * weight[c] + bias[c];
    }
}

// With xhat = (x - mean) * rstd and g = dout * weight: the mean and the variance both depend on
// each x, which takes the mean of g and the part of g along xhat out of the gradient:
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
void oracle_layernorm_backward(double* dinp, double* dweight, double* dbias, const double* dout,
                               const double* inp, const double* weight, int N, int C) {
    for (int n = 0; n < N; n++) {
        const double *x = inp + (size_t)n * C, *dy = dout + (size_t)n * C;
        double mean, rstd, mean_g = 0, mean_g_xhat = 0;
        row_statistics(&mean, &rstd, x, C);
        for (int c = 0; c < C; c++) {
            double xhat = (x[c] - mean) * rstd, g = dy[c] * weight[c];
            mean_g += g / C;
            mean_g_xhat += g * xhat / C;
            dweight[c] += dy[c] * xhat;
            dbias[c] += dy[c];
        }
        for (int c = 0; c < C; c++) {
            double xhat = (x[c] - mean) * rstd, g = dy[c] * weight[c];
            dinp[(size_t)n * C + c] += rstd * (g - mean_g - xhat * mean_g_xhat);
        }
    }
}

// ---- matrix products ----------------------------------------------------------------------------

static size_t weight_index(WeightLayout layout, int c, int o, int C, int OC) {
    return layout == WEIGHT_IN_OUT ? (size_t)c * OC + o : (size_t)o * C + c;
}

void oracle_matmul_forward(double* out, const double* in, const double* weight, WeightLayout layout,
                           const double* bias, int N, int C, int OC) {
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            double sum = bias ? bias[o] : 0;
            for (int c = 0; c < C; c++)
                sum += in[(size_t)n * C + c] * weight[weight_index(layout, c, o, C, OC)];
            out[(size_t)n * OC + o] = sum;
        }
}

void oracle_matmul_backward(double* din, double* dweight, double* dbias, const double* dout,
                            const double* in, const double* weight, WeightLayout layout, int N,
                            int C, int OC) {
    for (size_t i = 0; i < (size_t)N * C; i++) din[i] = 0;
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            double dy = dout[(size_t)n * OC + o];
            dbias[o] += dy;
            for (int c = 0; c < C; c++) {
                size_t w = weight_index(layout, c, o, C, OC);
                din[(size_t)n * C + c] += dy * weight[w];
                dweight[w] += dy * in[(size_t)n * C + c];
            }
        }
}

// 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3).
static const double SQRT_2_OVER_PI = 0.79788456080286535588;

void oracle_gelu_forward(double* out, const double* in, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double x = in[i];
        out[i] = 0.5 * x * (1 + tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)));
    }
}

void oracle_gelu_backward(double* din, const double* dout, const double* in, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double x = in[i], t = tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x));
        double du = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x);
        din[i] = dout[i] * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du);
    }
}

// ---- attention ----------------------------------------------------------------------------------

// Element i of head h of q (part 0), k (1) or v (2) at position t of sequence b.
typedef struct {
    int T, C, HS;
} HeadLayout;
static size_t qkv_index(const HeadLayout* at, int b, int t, int part, int h, int i) {
    return ((size_t)b * at->T + t) * 3 * at->C + (size_t)part * at->C + (size_t)h * at->HS + i;
}

// p[s] = softmax over s <= t of q_t . k_s / sqrt(HS). Returns the log of the denominator.
static double attention_row(double* p, const double* qkv, const HeadLayout* at, int b, int h,
                            int t) {
    double largest = -(double)INFINITY, sum = 0;
    for (int s = 0; s <= t; s++) {
        double dot = 0;
        for (int i = 0; i < at->HS; i++)
            dot += qkv[qkv_index(at, b, t, 0, h, i)] * qkv[qkv_index(at, b, s, 1, h, i)];
        p[s] = dot / sqrt(at->HS);
        largest = fmax(largest, p[s]);
    }
    for (int s = 0; s <= t; s++) sum += exp(p[s] - largest);
    for (int s = 0; s <= t; s++) p[s] = exp(p[s] - largest) / sum;
    return largest + log(sum);
}

void oracle_attention_forward(double* out, double* lse, const double* qkv, int B, int T, int C,
                              int NH) {
    HeadLayout at = {T, C, C / NH};
    double* p = new_doubles((size_t)T);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
                lse[((size_t)b * NH + h) * T + t] = attention_row(p, qkv, &at, b, h, t);
                for (int i = 0; i < at.HS; i++) {
                    double sum = 0;
                    for (int s = 0; s <= t; s++) sum += p[s] * qkv[qkv_index(&at, b, s, 2, h, i)];
                    out[((size_t)b * T + t) * C + (size_t)h * at.HS + i] = sum;
                }
            }
    free(p);
}

// With dp[s] = dout_t . v_s, the softmax gives dscore[s] = p[s] (dp[s] - sum_r p[r] dp[r]).
void oracle_attention_backward(double* dqkv, const double* dout, const double* qkv, int B, int T,
                               int C, int NH) {
    HeadLayout at = {T, C, C / NH};
    double *p = new_doubles((size_t)T), *dp = new_doubles((size_t)T);
    for (size_t i = 0; i < (size_t)B * T * 3 * C; i++) dqkv[i] = 0;
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
                const double* dy = dout + ((size_t)b * T + t) * C + (size_t)h * at.HS;
                double mean_dp = 0;
                attention_row(p, qkv, &at, b, h, t);
                for (int s = 0; s <= t; s++) {
                    dp[s] = 0;
                    for (int i = 0; i < at.HS; i++) {
                        dp[s] += dy[i] * qkv[qkv_index(&at, b, s, 2, h, i)];
                        dqkv[qkv_index(&at, b, s, 2, h, i)] += p[s] * dy[i];
                    }
                    mean_dp += p[s] * dp[s];
                }
                for (int s = 0; s <= t; s++) {
                    double dscore = p[s] * (dp[s] - mean_dp) / sqrt(at.HS);
                    for (int i = 0; i < at.HS; i++) {
                        size_t q = qkv_index(&at, b, t, 0, h, i), k = qkv_index(&at, b, s, 1, h, i);
                        dqkv[q] += dscore * qkv[k];
                        dqkv[k] += dscore * qkv[q];
                    }
                }
            }
    free(p);
    free(dp);
}

// ---- classifier ---------------------------------------------------------------------------------

void oracle_classifier(double* losses, double* dlogits, const double* logits, const int* targets,
                       int N, int V, int Vp, double dloss) {
    for (int n = 0; n < N; n++) {
        const double* row = logits + (size_t)n * Vp;
        double* drow = dlogits + (size_t)n * Vp;
        double largest = row[0], sum = 0;
        for (int v = 0; v < V; v++) largest = fmax(largest, row[v]);
        for (int v = 0; v < V; v++) sum += exp(row[v] - largest);
        bool masked = targets[n] < 0;
        losses[n] = masked ? 0 : largest + log(sum) - row[targets[n]];
        for (int v = 0; v < Vp; v++) {
            double softmax = v < V ? exp(row[v] - largest) / sum : 0;
            drow[v] = masked || v >= V ? 0 : (softmax - (v == targets[n])) * dloss;
        }
    }
}

// ---- optimizer ----------------------------------------------------------------------------------

void oracle_adamw(double* master, double* m, double* v, const double* grad, size_t count,
                  bool decay, const AdamW* adamw) {
    double beta1 = (double)adamw->beta1, beta2 = (double)adamw->beta2, lr = (double)adamw->lr;
    double weight_decay = decay ? (double)adamw->weight_decay : 0;
    for (size_t i = 0; i < count; i++) {
        double g = grad[i] * (double)adamw->grad_scale;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        double m_hat = m[i] / (double)adamw->correction1, v_hat = v[i] / (double)adamw->correction2;
        master[i] -= lr * (m_hat / (sqrt(v_hat) + (double)adamw->eps) + weight_decay * master[i]);
    }
}
