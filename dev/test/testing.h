// dev/test/testing.h - what every test program shares: one line per case, the error metric, seeded
// data and the one table of tolerances.
//
// A case is any number of EXPECTs followed by test_report, which prints
//   ok     layernorm_backward dweight (8,65) bf16   nmse 3.1e-12 < 1.5e-11   ref=oracle
// or FAILED and the same text; each EXPECT that failed has printed its own line before. A program
// ends with `return test_finish();`. C11 and C++17 alike.
#ifndef DEV_TEST_TESTING_H
#define DEV_TEST_TESTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "core/check.h"
#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- cases --------------------------------------------------------------------------------------

// Ranks other than 0 print failures only; without a call the process counts as rank 0.
void test_set_rank(int rank);

// Marks the current case failed and prints file, line and text, unless cond holds.
#define EXPECT(cond, ...) test_expect((cond), __FILE__, __LINE__, __VA_ARGS__)
bool test_expect(bool cond, const char* file, int line, const char* fmt, ...) PRINTF_LIKE(4, 5);

// Ends the current case and counts it. True if it passed.
bool test_report(const char* fmt, ...) PRINTF_LIKE(1, 2);
void test_skip(const char* fmt, ...) PRINTF_LIKE(1, 2);

// Prints "N passed, N failed, N skipped"; 0, or 1 if a case failed or none ran.
int test_finish(void);

// ---- errors -------------------------------------------------------------------------------------

// Normalised mean square error, sum (got - ref)^2 / sum ref^2. Infinity if a value of `got` is not
// finite; where all of `ref` is 0 the largest |got|, squared.
double nmse(const double* got, const double* ref, size_t count);

// A whole case: nmse(got, ref) < tolerance. `what` names the case; ref_name what made ref.
bool test_close(const double* got, const double* ref, size_t count, double tolerance,
                const char* ref_name, const char* what, ...) PRINTF_LIKE(6, 7);

// Tolerances, as NMSE, by the type of floatX. Inputs are rounded to floatX before both sides see
// them, so that only the operation's own roundings count. u is the unit roundoff: one rounding to
// nearest changes a value by at most u times itself, so alone it has an NMSE of at most u^2 (about
// u^2 / 7 on the average over mantissas).
typedef enum {
    // Values that stay in fp32 (statistics, losses, fp32 gradients), whatever floatX is. A sum of K
    // terms of both signs has an NMSE of about K u^2 / 6; K = 4096 covers every shape of the tests.
    TOL_FP32,
    // Values that stay in double: the same sum with u = 2^-53.
    TOL_FP64,
    // One result computed in fp32 and rounded once to floatX.
    TOL_ROUNDED,
    // The same where an intermediate tensor may be rounded to floatX too: 2 roundings that add, and
    // the cross term: (2u)^2.
    TOL_ROUNDED_TWICE,
    // Attention forward: the probabilities may be rounded to floatX before P V, and the output is.
    // The sum over P has terms of one sign for V = const, so the two errors add as above.
    TOL_ATTENTION,
    // Attention backward: P, dP - D (with D from the rounded output) and dS are rounded before the
    // last product and the result after it. dP - D cancels: its error is that of its operands,
    // which are up to twice as large for random data. (1 + 1 + 2 + 1)^2 u^2.
    TOL_ATTENTION_BACKWARD,
    // AdamW: about ten fp32 operations per element, none of which cancels: (10 u)^2.
    TOL_ADAMW,
    // Logits and gradients of the whole model, and what a few AdamW steps move its weights by.
    // fp32: 1e-9. Else a value has passed some 60 roundings of u^2 / 7 each on its way through
    // three blocks and back, and LayerNorm and softmax may double it: 64 u^2, 1e-3 in bf16.
    TOL_MODEL,
    // Not squares. Absolute error of a loss: 1e-4 in fp32; else logits of about 2 with an error of
    // 8 u each, averaged over 48 tokens: 2 * 8 u / 7.
    TOL_MODEL_LOSS,
    // Relative error of a gradient norm: at most that of the gradient.
    TOL_MODEL_NORM,
    NUM_TOLERANCES
} Tolerance;

double tolerance_for(Tolerance kind, DType dtype);
static inline double tolerance(Tolerance kind) { return tolerance_for(kind, FLOATX_DTYPE); }

// ---- data ---------------------------------------------------------------------------------------

// out[i] = normal(0, scale), a function of seed and i alone.
void fill_normal(double* out, size_t count, double scale, uint64_t seed);

// out[i] = scale * (2 frac(i * golden ratio) - 1): no two elements are equal, any few neighbours
// are spread over [-scale, scale), so that a misplaced index shows and no sum is ill-conditioned.
// Source: Weyl 1916, equidistribution of multiples of an irrational number modulo 1.
void fill_spread(double* out, size_t count, double scale);

// Rounds each element to dtype (to nearest, ties to even) and back.
void round_to(double* values, size_t count, DType dtype);

// Zeroed host memory for doubles; free() it.
double* new_doubles(size_t count);

#ifdef __cplusplus
}
#endif
#endif
