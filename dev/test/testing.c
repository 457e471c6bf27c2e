// dev/test/testing.c - counting and printing of cases, NMSE, seeded data, the tolerance table.
#include "testing.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "core/rng.h"

static int test_rank, num_passed, num_failed, num_skipped;
static bool case_failed;

// ---- cases --------------------------------------------------------------------------------------

void test_set_rank(int rank) { test_rank = rank; }

static void print_line(const char* verdict, const char* fmt, va_list args) {
    if (test_rank != 0) printf("[rank %d] ", test_rank);
    printf("%-6s ", verdict);
    vprintf(fmt, args);
    printf("\n");
    fflush(stdout);
}

bool test_expect(bool cond, const char* file, int line, const char* fmt, ...) {
    if (cond) return true;
    case_failed = true;
    if (test_rank != 0) printf("[rank %d] ", test_rank);
    printf("  %s:%d: ", file, line);
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    printf("\n");
    return false;
}

bool test_report(const char* fmt, ...) {
    bool passed = !case_failed;
    case_failed = false;
    if (passed)
        num_passed++;
    else
        num_failed++;
    if (passed && test_rank != 0) return true;
    va_list args;
    va_start(args, fmt);
    print_line(passed ? "ok" : "FAILED", fmt, args);
    va_end(args);
    return passed;
}

void test_skip(const char* fmt, ...) {
    num_skipped++;
    if (test_rank != 0) return;
    va_list args;
    va_start(args, fmt);
    print_line("skip", fmt, args);
    va_end(args);
}

int test_finish(void) {
    if (case_failed) test_report("checks after the last case");
    if (test_rank == 0) {
        printf("%d passed, %d failed, %d skipped\n", num_passed, num_failed, num_skipped);
    }
    return num_failed > 0 || num_passed + num_skipped == 0;
}

// ---- errors -------------------------------------------------------------------------------------

double nmse(const double* got, const double* ref, size_t count) {
    double error = 0, power = 0, largest = 0;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(got[i])) return (double)INFINITY;
        error += (got[i] - ref[i]) * (got[i] - ref[i]);
        power += ref[i] * ref[i];
        largest = fmax(largest, fabs(got[i]));
    }
    return power > 0 ? error / power : largest * largest;
}

bool test_close(const double* got, const double* ref, size_t count, double limit,
                const char* ref_name, const char* what, ...) {
    char name[200];
    va_list args;
    va_start(args, what);
    vsnprintf(name, sizeof name, what, args);
    va_end(args);

    double error = nmse(got, ref, count);
    bool passed = error < limit;
    if (!passed) { // the worst element, to see where to look
        size_t worst = 0;
        for (size_t i = 0; i < count; i++) {
            double here = fabs(got[i] - ref[i]), most = fabs(got[worst] - ref[worst]);
            if (!isfinite(got[i]) || here > most) worst = i;
            if (!isfinite(got[i])) break;
        }
        EXPECT(false, "element %zu of %zu: got %.9g, expected %.9g", worst, count, got[worst],
               ref[worst]);
    }
    return test_report("%s   nmse %.1e %s %.1e   ref=%s", name, error, passed ? "<" : ">=", limit,
                       ref_name);
}

double tolerance_for(Tolerance kind, DType dtype) {
    // Unit roundoffs: 24, 8 and 11 bits of significand.
    const double u32 = 0x1p-24, u = dtype == DTYPE_FP32   ? u32
                                    : dtype == DTYPE_BF16 ? 0x1p-8
                                                          : 0x1p-11;
    const double sum = 4096 * u32 * u32; // the fp32 arithmetic inside every operation
    switch (kind) {
    case TOL_FP32:
        return sum;
    case TOL_FP64:
        return 4096 * 0x1p-106;
    case TOL_ROUNDED:
        return sum + u * u;
    case TOL_ROUNDED_TWICE:
        return sum + 4 * u * u;
    case TOL_ATTENTION:
        return sum + 4 * u * u;
    case TOL_ATTENTION_BACKWARD:
        return sum + 25 * u * u;
    case TOL_ADAMW:
        return 100 * u32 * u32;
    case TOL_MODEL:
        return 1e-9 + 64 * u * u;
    case TOL_MODEL_LOSS:
        return dtype == DTYPE_FP32 ? 1e-4 : 2 * 8 * u / 7;
    case TOL_MODEL_NORM:
        return sqrt(1e-9 + 64 * u * u);
    case NUM_TOLERANCES:
        break;
    }
    DIE("no tolerance of kind %d", (int)kind);
}

// ---- data ---------------------------------------------------------------------------------------

void fill_normal(double* out, size_t count, double scale, uint64_t seed) {
    for (size_t i = 0; i < count; i++) out[i] = scale * rng_normal(seed, 0, i);
}

void fill_spread(double* out, size_t count, double scale) {
    for (size_t i = 0; i < count; i++)
        out[i] = scale * (2 * fmod((double)i * 0.6180339887498949, 1) - 1);
}

void round_to(double* values, size_t count, DType dtype) {
    for (size_t i = 0; i < count; i++) {
        float x = (float)values[i];
        if (dtype == DTYPE_BF16) x = bf16_bits_to_float(float_to_bf16_bits(x));
        if (dtype == DTYPE_FP16) x = fp16_bits_to_float(float_to_fp16_bits(x));
        values[i] = (double)x;
    }
}

double* new_doubles(size_t count) { return (double*)checked_calloc(count + 1, sizeof(double)); }
