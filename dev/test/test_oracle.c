// dev/test/test_oracle.c - is the oracle right? Each backward against central finite differences of
// its forward, each forward against cases with a known answer.
//
// The scalar function is f(x) = sum_i r[i] * out[i](x) with random r, so that the gradient of f is
// what the backward returns for dout = r.
#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include "testing.h"

// Central differences with step h have a truncation error of h^2 |f'''| / 6 and a rounding error of
// about 2^-53 |f| / h; h = 1e-5 makes both about 1e-10 for f, f''' of the order of 1 to 10.
// Squared.
static const double STEP = 1e-5, DIFFERENCE_TOLERANCE = 1e-18;
// Two double computations of the same number that differ in the order of at most 1000 additions.
static const double EXACT = 1e-27;

typedef double (*Function)(void* context);

static double dot(const double* a, const double* b, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) sum += a[i] * b[i];
    return sum;
}

// Checks `gradient` (count) against differences of f in each x[i].
static void check_gradient(const char* name, const double* gradient, double* x, size_t count,
                           Function f, void* context) {
    double* expected = new_doubles(count);
    for (size_t i = 0; i < count; i++) {
        double saved = x[i];
        x[i] = saved + STEP;
        double above = f(context);
        x[i] = saved - STEP;
        expected[i] = (above - f(context)) / (2 * STEP);
        x[i] = saved;
    }
    test_close(gradient, expected, count, DIFFERENCE_TOLERANCE, "differences", "%s", name);
    free(expected);
}

static double* random_doubles(size_t count, double scale, uint64_t seed) {
    double* x = new_doubles(count);
    fill_normal(x, count, scale, seed);
    return x;
}

// ---- embedding ----------------------------------------------------------------------------------

enum { B = 2, T = 5, N = B * T, C = 6, NH = 2, OC = 7, V = 5, VP = 8 };

typedef struct {
    int tokens[N];
    double *wte, *wpe, *out, *r;
} Embedding;
static double embedding_value(void* context) {
    Embedding* e = (Embedding*)context;
    oracle_embedding_forward(e->out, e->tokens, e->wte, e->wpe, 0, B, T, C);
    return dot(e->out, e->r, N * C);
}

static void test_embedding(void) {
    Embedding e = {{0, 4, 4, 1, 0, 2, 4, 1, 1, 0}, NULL, NULL, NULL, NULL};
    e.wte = random_doubles(V * C, 1, 1);
    e.wpe = random_doubles(T * C, 1, 2);
    e.r = random_doubles(N * C, 1, 3);
    e.out = new_doubles(N * C);
    double *dwte = new_doubles(V * C), *dwpe = new_doubles(T * C);
    oracle_embedding_backward(dwte, dwpe, e.r, e.tokens, B, T, C);
    check_gradient("embedding dwte", dwte, e.wte, V * C, embedding_value, &e);
    check_gradient("embedding dwpe", dwpe, e.wpe, T * C, embedding_value, &e);

    double* shifted = new_doubles(C);
    oracle_embedding_forward(shifted, e.tokens + 1, e.wte, e.wpe, 3, 1, 1, C);
    for (int c = 0; c < C; c++)
        EXPECT(shifted[c] == e.wte[4 * C + c] + e.wpe[3 * C + c], "position 3, channel %d", c);
    test_report("embedding first_pos");
    free(e.wte), free(e.wpe), free(e.r), free(e.out), free(dwte), free(dwpe), free(shifted);
}

// ---- LayerNorm ----------------------------------------------------------------------------------

typedef struct {
    double *inp, *weight, *bias, *out, *mean, *rstd, *r;
} LayerNorm;
static double layernorm_value(void* context) {
    LayerNorm* l = (LayerNorm*)context;
    oracle_layernorm_forward(l->out, l->mean, l->rstd, l->inp, l->weight, l->bias, N, C);
    return dot(l->out, l->r, N * C);
}

static void test_layernorm(void) {
    LayerNorm l = {random_doubles(N * C, 1, 4), random_doubles(C, 1, 5), random_doubles(C, 1, 6),
                   new_doubles(N * C),          new_doubles(N),          new_doubles(N),
                   random_doubles(N * C, 1, 7)};
    double *dinp = new_doubles(N * C), *dweight = new_doubles(C), *dbias = new_doubles(C);
    oracle_layernorm_backward(dinp, dweight, dbias, l.r, l.inp, l.weight, N, C);
    check_gradient("layernorm dinp", dinp, l.inp, N * C, layernorm_value, &l);
    check_gradient("layernorm dweight", dweight, l.weight, C, layernorm_value, &l);
    check_gradient("layernorm dbias", dbias, l.bias, C, layernorm_value, &l);

    // The row (-a, a): mean 0, variance a^2, so out = +-a / sqrt(a^2 + eps).
    double two[2] = {-3e-3, 3e-3}, ones[2] = {1, 1}, zeros[2] = {0, 0}, out[2], mean, rstd;
    oracle_layernorm_forward(out, &mean, &rstd, two, ones, zeros, 1, 2);
    double expected[2] = {-3e-3 / sqrt(9e-6 + 1e-5), 3e-3 / sqrt(9e-6 + 1e-5)};
    test_close(out, expected, 2, EXACT, "formula", "layernorm of (-a, a)");
    free(l.inp), free(l.weight), free(l.bias), free(l.out), free(l.mean), free(l.rstd), free(l.r);
    free(dinp), free(dweight), free(dbias);
}

// ---- matrix products and GELU -------------------------------------------------------------------

typedef struct {
    double *in, *weight, *bias, *out, *r;
    WeightLayout layout;
} Matmul;
static double matmul_value(void* context) {
    Matmul* m = (Matmul*)context;
    oracle_matmul_forward(m->out, m->in, m->weight, m->layout, m->bias, N, C, OC);
    return dot(m->out, m->r, N * OC);
}

static void test_matmul(WeightLayout layout) {
    Matmul m = {random_doubles(N * C, 1, 8),   random_doubles(C * OC, 1, 9),
                random_doubles(OC, 1, 10),     new_doubles(N * OC),
                random_doubles(N * OC, 1, 11), layout};
    double *din = new_doubles(N * C), *dweight = new_doubles(C * OC), *dbias = new_doubles(OC);
    bool in_out = layout == WEIGHT_IN_OUT;
    oracle_matmul_backward(din, dweight, dbias, m.r, m.in, m.weight, layout, N, C, OC);
    check_gradient(in_out ? "matmul (C, OC) din" : "matmul (OC, C) din", din, m.in, N * C,
                   matmul_value, &m);
    check_gradient(in_out ? "matmul (C, OC) dweight" : "matmul (OC, C) dweight", dweight, m.weight,
                   C * OC, matmul_value, &m);
    check_gradient("matmul dbias", dbias, m.bias, OC, matmul_value, &m);
    free(m.in), free(m.weight), free(m.bias), free(m.out), free(m.r), free(din), free(dweight);
    free(dbias);
}

// Layouts told apart: (1 2) times the matrix that maps (x, y) to (x, 3y, 5x + 7y).
static void test_matmul_layout(void) {
    double in[2] = {1, 2}, out[3], expected[3] = {1, 6, 19};
    double in_out[6] = {1, 0, 5, 0, 3, 7}, out_in[6] = {1, 0, 0, 3, 5, 7};
    oracle_matmul_forward(out, in, in_out, WEIGHT_IN_OUT, NULL, 1, 2, 3);
    test_close(out, expected, 3, EXACT, "formula", "matmul (C, OC)");
    oracle_matmul_forward(out, in, out_in, WEIGHT_OUT_IN, NULL, 1, 2, 3);
    test_close(out, expected, 3, EXACT, "formula", "matmul (OC, C)");
}

typedef struct {
    double *in, *out, *r;
} Gelu;
static double gelu_value(void* context) {
    Gelu* g = (Gelu*)context;
    oracle_gelu_forward(g->out, g->in, N);
    return dot(g->out, g->r, N);
}

static void test_gelu(void) {
    Gelu g = {random_doubles(N, 2, 12), new_doubles(N), random_doubles(N, 1, 13)};
    double* din = new_doubles(N);
    oracle_gelu_backward(din, g.r, g.in, N);
    check_gradient("gelu din", din, g.in, N, gelu_value, &g);

    // The exact GELU x * Phi(x) is what the tanh form approximates, to 5e-4.
    for (int i = 0; i < N; i++) {
        double exact = g.in[i] * 0.5 * erfc(-g.in[i] / sqrt(2));
        EXPECT(fabs(g.out[i] - exact) < 5e-4, "gelu(%g) = %g, near %g", g.in[i], g.out[i], exact);
    }
    test_report("gelu near x Phi(x)");
    free(g.in), free(g.out), free(g.r), free(din);
}

// ---- attention ----------------------------------------------------------------------------------

typedef struct {
    double *qkv, *out, *lse, *r;
} Attention;
static double attention_value(void* context) {
    Attention* a = (Attention*)context;
    oracle_attention_forward(a->out, a->lse, a->qkv, B, T, C, NH);
    return dot(a->out, a->r, N * C);
}

static void test_attention(void) {
    Attention a = {random_doubles(N * 3 * C, 1, 14), new_doubles(N * C), new_doubles(B * NH * T),
                   random_doubles(N * C, 1, 15)};
    double* dqkv = new_doubles(N * 3 * C);
    oracle_attention_backward(dqkv, a.r, a.qkv, B, T, C, NH);
    check_gradient("attention dqkv", dqkv, a.qkv, N * 3 * C, attention_value, &a);

    // Keys of 0: each position averages the values up to itself, and the denominator counts them.
    double *expected = new_doubles(N * C), *expected_lse = new_doubles(B * NH * T);
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            a.qkv[(n * 3 + 1) * C + c] = 0;
            int t = n % T;
            for (int s = n - t; s <= n; s++)
                expected[n * C + c] += a.qkv[(s * 3 + 2) * C + c] / (t + 1);
        }
    for (int i = 0; i < B * NH * T; i++) expected_lse[i] = log(i % T + 1);
    attention_value(&a);
    test_close(a.out, expected, N * C, EXACT, "formula", "attention to keys of 0");
    test_close(a.lse, expected_lse, B * NH * T, EXACT, "formula", "attention lse of keys of 0");

    // One channel, two positions: scores q1 k0 and q1 k1, scale 1.
    double tiny[6] = {9, 1, 10, 2, 3, 20}, out[2], lse[2], w = 1 / (1 + exp(2.0 * (3 - 1)));
    double tiny_out[2] = {10, 10 * w + 20 * (1 - w)};
    oracle_attention_forward(out, lse, tiny, 1, 2, 1, 1);
    test_close(out, tiny_out, 2, EXACT, "formula", "attention of two positions");
    // The scale 1/sqrt(HS), with 4 equal channels: q.k = 4 * 0.5 * 2 / 2 = 2.
    double four[12] = {0.5, 0.5, 0.5, 0.5, 2, 2, 2, 2, 1, 1, 1, 1}, out4[4], lse4, expected4 = 2;
    oracle_attention_forward(out4, &lse4, four, 1, 1, 4, 1);
    test_close(&lse4, &expected4, 1, EXACT, "formula", "attention scale");
    free(a.qkv), free(a.out), free(a.lse), free(a.r), free(dqkv), free(expected),
        free(expected_lse);
}

// ---- classifier ---------------------------------------------------------------------------------

static const double DLOSS = 0.25;
typedef struct {
    int targets[N];
    double *logits, *losses, *dlogits;
} Classifier;
static double classifier_value(void* context) {
    Classifier* k = (Classifier*)context;
    double sum = 0;
    oracle_classifier(k->losses, k->dlogits, k->logits, k->targets, N, V, VP, DLOSS);
    for (int n = 0; n < N; n++) sum += DLOSS * k->losses[n];
    return sum;
}

static void test_classifier(void) {
    Classifier k = {{0, 4, -1, 1, 0, 2, 3, -1, 1, 0}, NULL, NULL, NULL};
    k.logits = random_doubles(N * VP, 2, 16);
    k.losses = new_doubles(N);
    k.dlogits = new_doubles(N * VP);
    double* dlogits = new_doubles(N * VP);
    oracle_classifier(k.losses, dlogits, k.logits, k.targets, N, V, VP, DLOSS);
    check_gradient("classifier dlogits", dlogits, k.logits, N * VP, classifier_value, &k);

    double* expected = new_doubles(N);
    for (int i = 0; i < N * VP; i++) k.logits[i] = 700;
    for (int n = 0; n < N; n++) expected[n] = k.targets[n] < 0 ? 0 : log((double)V);
    classifier_value(&k);
    test_close(k.losses, expected, N, 1e-24, "formula",
               "classifier of equal logits"); // 700 - 700 ulp
    free(k.logits), free(k.losses), free(k.dlogits), free(dlogits), free(expected);
}

// ---- optimizer ----------------------------------------------------------------------------------

// At step 1 from m = v = 0 the corrections cancel the betas: the update is lr * g / (|g| + eps),
// and decay takes lr * weight_decay off besides. Step 2 with the same gradient moves by the same.
static void test_adamw(void) {
    AdamW adamw = {0.5f, 0.75f, 0.875f, 0.25f, 0.125f, 0.25f, 0.125f, 2.0f}; // exact in binary
    double master[2] = {3, -5}, m[2] = {0, 0}, v[2] = {0, 0}, grad[2] = {0.5, -1.5};
    double expected[2] = {3 - 0.5 * (1 / 1.25 + 0.125 * 3), -5 - 0.5 * (-3 / 3.25 - 0.125 * 5)};
    oracle_adamw(master, m, v, grad, 2, true, &adamw);
    test_close(master, expected, 2, EXACT, "formula", "adamw first step");

    adamw.correction1 = 1 - 0.75f * 0.75f;
    adamw.correction2 = 1 - 0.875f * 0.875f;
    expected[0] = master[0] - 0.5 * (1 / 1.25);
    expected[1] = master[1] - 0.5 * (-3 / 3.25);
    oracle_adamw(master, m, v, grad, 2, false, &adamw);
    test_close(master, expected, 2, EXACT, "formula", "adamw second step, no decay");
}

int main(void) {
    test_embedding();
    test_layernorm();
    test_matmul(WEIGHT_IN_OUT);
    test_matmul(WEIGHT_OUT_IN);
    test_matmul_layout();
    test_gelu();
    test_attention();
    test_classifier();
    test_adamw();
    return test_finish();
}
