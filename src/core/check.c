// core/check.c - errors as values, warnings, and the one way out. See check.h.
#include "core/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/dtype.h"

// The one definition that every object refers to: objects of two precisions do not link together.
const int FLOATX_TAG = FLOATX_DTYPE;

static int this_rank = 0, num_ranks = 1;
static void (*abort_hook)(int code);
static bool (*may_report_hook)(void);

void check_set_rank(int rank, int world_size) {
    this_rank = rank;
    num_ranks = world_size;
}

void check_set_abort_hook(void (*abort_all_ranks)(int code), bool (*may_report)(void)) {
    abort_hook = abort_all_ranks;
    may_report_hook = may_report;
}

// A message stays one line, whatever stands in the file names and values that it quotes.
static void keep_one_line(char* text) {
    for (char* c = text; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
}

bool error_set(Error* error, int code, const char* fmt, ...) {
    if (error->code != 0) return false;
    error->code = code;
    va_list args;
    va_start(args, fmt);
    vsnprintf(error->text, sizeof(error->text), fmt, args);
    va_end(args);
    keep_one_line(error->text);
    return false;
}

_Noreturn void error_exit(const Error* error) {
    fflush(stdout);
    if (!may_report_hook || may_report_hook()) fprintf(stderr, "error: %s\n", error->text);
    fflush(stderr);
    if (abort_hook) abort_hook(error->code);
    _exit(error->code);
}

void warn(const char* fmt, ...) {
    if (this_rank != 0) return;
    char text[1000];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    keep_one_line(text);
    fflush(stdout);
    fprintf(stderr, "warning: %s\n", text);
}

_Noreturn void die_at(const char* file, int line, int code, const char* fmt, ...) {
    char text[1000], host[64] = "?";
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    keep_one_line(text);
    gethostname(host, sizeof(host) - 1);
    fflush(stdout);
    fprintf(stderr, "[rank %d/%d %s] %s:%d: %s\n", this_rank, num_ranks, host, file, line, text);
    fflush(stderr);
    if (abort_hook) abort_hook(code);
    _exit(code);
}

void* checked_malloc(size_t bytes) {
    void* p = malloc(bytes ? bytes : 1);
    CHECK(p, "out of host memory: %zu bytes", bytes);
    return p;
}

void* checked_calloc(size_t count, size_t bytes) {
    void* p = calloc(count ? count : 1, bytes ? bytes : 1);
    CHECK(p, "out of host memory: %zu x %zu bytes", count, bytes);
    return p;
}
