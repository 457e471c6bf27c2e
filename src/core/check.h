// core/check.h - errors: what the user did wrong, what must never happen, and the one way out.
//
// Two kinds, kept apart. An Error is a value: a function that reads options or files fills it and
// returns false; the caller agrees on it with the other ranks (comm_agree) and one rank prints one
// line. CHECK and DIE are for what must hold whatever the user does: they print rank, host, file
// and line and leave at once.
#ifndef CORE_CHECK_H
#define CORE_CHECK_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
#define NO_RETURN [[noreturn]]
extern "C" {
#else
#define NO_RETURN _Noreturn
#endif

// Exit codes of both programs.
enum {
    EXIT_FINISHED = 0,
    EXIT_INTERNAL = 1,  // a CHECK failed; also mpirun's own
    EXIT_USAGE = 2,     // bad arguments or input
    EXIT_NONFINITE = 3, // stopped on non-finite numbers
    EXIT_FILE_IO = 4,   // a file could not be written or read back
    EXIT_COMM = 5,      // communication failure or time-out
};

// The first error wins: later error_set calls on the same Error change nothing.
typedef struct {
    int code; // 0: no error, else one of the exit codes
    char text[1000];
} Error;

#if defined(__GNUC__)
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define PRINTF_LIKE(fmt, args)
#endif

// Stores one line, "what (value, expected), where, fix", without a newline. Always returns false,
// so that `return error_set(...)` ends a function which returns success.
bool error_set(Error* error, int code, const char* fmt, ...) PRINTF_LIKE(3, 4);

// Prints "error: <text>" to stderr and ends all ranks with the error's code: for an error that this
// rank cannot agree on with the others. Where several call it, one of them prints.
NO_RETURN void error_exit(const Error* error);

// Prints "warning: <text>" to stderr, from rank 0 only.
void warn(const char* fmt, ...) PRINTF_LIKE(1, 2);

// Who speaks in DIE's line and whether warn() prints; set once ranks are known.
void check_set_rank(int rank, int world_size);

// What DIE and error_exit call instead of exit(), so that core does not depend on MPI; may_report
// is true for the first rank of a host that asks.
void check_set_abort_hook(void (*abort_all_ranks)(int code), bool (*may_report)(void));

// "[rank 3/8 host] file:line: text", then the abort hook (or exit) with `code`.
NO_RETURN void die_at(const char* file, int line, int code, const char* fmt, ...) PRINTF_LIKE(4, 5);

#define DIE(...) die_at(__FILE__, __LINE__, EXIT_INTERNAL, __VA_ARGS__)
#define CHECK(cond, ...)                                                                           \
    do {                                                                                           \
        if (!(cond)) DIE(__VA_ARGS__);                                                             \
    } while (0)

// malloc and calloc that cannot fail: for small host structures. Device memory: backend/device.h.
void* checked_malloc(size_t bytes);
void* checked_calloc(size_t count, size_t bytes);

static inline size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
static inline size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }
static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

#ifdef __cplusplus
}
#endif
#endif
