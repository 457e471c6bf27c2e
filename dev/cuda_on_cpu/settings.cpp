// settings.cpp - reads the environment variables CUDA_ON_CPU_*.
#include "settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char** environ;

namespace emu {

namespace {

const char PREFIX[] = "CUDA_ON_CPU_";

[[noreturn]] void refuse(const char* name, const char* value, const char* expected) {
    fprintf(stderr, "%s%s=%s: expected %s\n", PREFIX, name, value, expected);
    exit(2);
}

unsigned long read_number(const char* name, const char* value, const char* digits) {
    char* end;
    errno = 0;
    unsigned long number = strtoul(digits, &end, 10);
    if (*digits < '0' || *digits > '9' || *end || errno) refuse(name, value, "a number");
    return number;
}

bool read_flag(const char* name, const char* value) {
    if (strcmp(value, "0") == 0) return false;
    if (strcmp(value, "1") == 0) return true;
    refuse(name, value, "0 or 1");
}

// "random:SEED"; false if the value is something else.
bool read_random(const char* name, const char* value, unsigned* seed) {
    if (strncmp(value, "random:", 7) != 0) return false;
    *seed = static_cast<unsigned>(read_number(name, value, value + 7));
    return true;
}

void read_order(Settings* s, const char* value) {
    if (strcmp(value, "forward") == 0)
        s->order = FORWARD;
    else if (strcmp(value, "reverse") == 0)
        s->order = REVERSE;
    else if (read_random("ORDER", value, &s->order_seed))
        s->order = RANDOM;
    else
        refuse("ORDER", value, "forward, reverse or random:SEED");
}

void read_lazy(Settings* s, const char* value) {
    if (strcmp(value, "0") == 0)
        s->lazy = EAGER;
    else if (strcmp(value, "1") == 0)
        s->lazy = ON_DEMAND;
    else if (strcmp(value, "ahead") == 0)
        s->lazy = AHEAD;
    else if (read_random("LAZY", value, &s->lazy_seed))
        s->lazy = RANDOM_STREAM;
    else
        refuse("LAZY", value, "0, 1, ahead or random:SEED");
}

void read_variable(Settings* s, const char* name, const char* value) {
    auto is = [name](const char* other) { return strcmp(name, other) == 0; };
    auto number = [&] { return read_number(name, value, value); };
    if (is("ORDER"))
        read_order(s, value);
    else if (is("LAZY"))
        read_lazy(s, value);
    else if (is("POISON"))
        s->poison = read_flag(name, value);
    else if (is("HIDE"))
        s->hide = read_flag(name, value);
    else if (is("PROFILE"))
        s->profile = read_flag(name, value);
    else if (is("NO_EPILOGUES")) {
        s->no_products = strcmp(value, "all") == 0;
        s->late_refusal = strcmp(value, "late") == 0;
        s->no_epilogues = s->no_products || (!s->late_refusal && read_flag(name, value));
    } else if (is("LIST_EDGES"))
        s->list_edges = read_flag(name, value);
    else if (is("DROP_WAIT"))
        s->drop_wait = static_cast<long>(number());
    else if (is("DROP_EDGE"))
        s->drop_edge = static_cast<long>(number());
    else if (is("DEVICES"))
        s->devices = static_cast<int>(number());
    else if (is("MEMORY_MB"))
        s->memory_bytes = number() << 20;
    else if (is("SHARED_KB")) {
        if (number() < 48 || number() > 227) refuse(name, value, "48 to 227");
        s->shared_bytes = number() << 10;
    } else if (is("ASYNC")) {
        if (strcmp(value, "early") != 0 && strcmp(value, "late") != 0) {
            refuse(name, value, "early or late");
        }
        s->copies_early = *value == 'e';
    } else
        refuse(name, value, "another name: there is no such setting");
}

Settings read_environment() {
    Settings s;
    for (char** entry = environ; *entry; entry++) {
        if (strncmp(*entry, PREFIX, sizeof PREFIX - 1) != 0) continue;
        const char* name = *entry + sizeof PREFIX - 1;
        const char* equals = strchr(name, '=');
        char copy[32];
        snprintf(copy, sizeof copy, "%.*s", static_cast<int>(equals - name), name);
        read_variable(&s, copy, equals + 1);
    }
    return s;
}

} // namespace

const Settings& settings() {
    static const Settings once = read_environment();
    return once;
}

} // namespace emu
