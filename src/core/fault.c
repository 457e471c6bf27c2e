// core/fault.c - faults on purpose. See fault.h.
#include "core/fault.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    FaultKind kind;
    bool is_mine;         // of this rank, or of every rank
    long rank, step, seq; // -1: not given
    char tensor[64];
    int ms;
    bool poison;
    char description[256];
} Fault;
static const Fault no_fault = {.kind = FAULT_NONE, .rank = -1, .step = -1, .seq = -1};
static Fault fault = {.kind = FAULT_NONE, .rank = -1, .step = -1, .seq = -1};

static const struct {
    const char* name;
    FaultKind kind;
} kinds[] = {{"nan", FAULT_NAN},     {"skip", FAULT_SKIP}, {"count", FAULT_COUNT},
             {"delay", FAULT_DELAY}, {"stop", FAULT_STOP}, {"killsave", FAULT_KILLSAVE},
             {"link", FAULT_LINK}};
enum { NUM_KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static bool parse_kind(const char* text, Error* error) {
    for (int i = 0; i < NUM_KINDS; i++) {
        if (strcmp(text, kinds[i].name) == 0) {
            fault.kind = kinds[i].kind;
            return true;
        }
    }
    return error_set(error, EXIT_USAGE,
                     "ZERO_FAULT: kind '%s' is not one of nan, skip, count, delay, stop, killsave, "
                     "link",
                     text);
}

static bool parse_field(char* field, int rank, Error* error) {
    char* value = strchr(field, '=');
    if (!value) return error_set(error, EXIT_USAGE, "ZERO_FAULT: '%s' is not NAME=VALUE", field);
    *value++ = '\0';
    if (strcmp(field, "tensor") == 0) {
        snprintf(fault.tensor, sizeof(fault.tensor), "%s", value);
        return true;
    }
    char* end;
    const long number = strtol(value, &end, 10);
    if (end == value || *end || number < 0 || number > INT_MAX) {
        return error_set(error, EXIT_USAGE, "ZERO_FAULT: %s is '%s', expected 0 to %d", field,
                         value, INT_MAX);
    }
    if (strcmp(field, "rank") == 0) {
        fault.rank = number;
        fault.is_mine = number == rank;
    } else if (strcmp(field, "step") == 0) {
        fault.step = number;
    } else if (strcmp(field, "seq") == 0) {
        fault.seq = number;
    } else if (strcmp(field, "ms") == 0) {
        fault.ms = (int)number;
    } else {
        return error_set(error, EXIT_USAGE,
                         "ZERO_FAULT: field '%s' is not one of rank, step, seq, tensor, ms", field);
    }
    return true;
}

bool fault_init(int rank, Error* error) {
    fault = no_fault;
    const char* debug = getenv("ZERO_DEBUG");
    if (debug && *debug) {
        if (strcmp(debug, "poison") != 0) {
            return error_set(error, EXIT_USAGE, "ZERO_DEBUG is '%s'; the only value is poison",
                             debug);
        }
        fault.poison = true;
    }
    const char* given = getenv("ZERO_FAULT");
    if (!given || !*given) return true;
    char text[sizeof(fault.description)];
    if (strlen(given) >= sizeof(text)) {
        return error_set(error, EXIT_USAGE, "ZERO_FAULT is longer than %zu characters",
                         sizeof(text) - 1);
    }
    strcpy(text, given);
    fault.is_mine = true;
    char* rest = NULL;
    const char* kind = strtok_r(text, ":", &rest);
    if (!parse_kind(kind ? kind : given, error)) return false;
    for (char* field; (field = strtok_r(NULL, ":", &rest)) != NULL;) {
        if (!parse_field(field, rank, error)) return false;
    }
    strcpy(fault.description, given);
    return true;
}

bool fault_check(const ParamTable* table, int world_size, Error* error) {
    if (fault.rank >= world_size)
        return error_set(error, EXIT_USAGE, "ZERO_FAULT: rank %ld of %d ranks", fault.rank,
                         world_size);
    if (fault.tensor[0] && param_find(table, fault.tensor) < 0)
        return error_set(error, EXIT_USAGE, "ZERO_FAULT: the model has no tensor '%s'",
                         fault.tensor);
    return true;
}

const char* fault_description(void) { return fault.description; }

bool fault_now(FaultKind kind, long step, long seq) {
    return kind == fault.kind && fault.is_mine && (fault.step < 0 || fault.step == step) &&
           (fault.seq < 0 || fault.seq == seq);
}

const char* fault_tensor(void) { return fault.tensor; }
int fault_delay_ms(void) { return fault.ms; }
bool debug_poison(void) { return fault.poison; }
