// core/ledger.c - the memory plan. See ledger.h.
#include "core/ledger.h"

#include <stdio.h>
#include <string.h>

#include "core/check.h"

LedgerLine* ledger_find(Ledger* ledger, const char* name) {
    for (int i = 0; i < ledger->num_lines; i++) {
        if (strcmp(ledger->lines[i].name, name) == 0) return &ledger->lines[i];
    }
    return NULL;
}

void ledger_add(Ledger* ledger, MemKind kind, const char* name, size_t bytes) {
    if (bytes == 0) return;
    CHECK(ledger->num_lines < LEDGER_MAX_LINES, "more than %d ledger lines", LEDGER_MAX_LINES);
    CHECK(!ledger_find(ledger, name), "ledger line '%s' added twice", name);
    LedgerLine* line = &ledger->lines[ledger->num_lines++];
    CHECK(strlen(name) < sizeof(line->name), "ledger line name '%s' is too long", name);
    snprintf(line->name, sizeof(line->name), "%s", name);
    line->kind = kind;
    line->bytes = bytes;
    line->ptr = NULL;
}

size_t ledger_kind_bytes(const Ledger* ledger, MemKind kind) {
    size_t bytes = 0;
    for (int i = 0; i < ledger->num_lines; i++) {
        if (ledger->lines[i].kind == kind) bytes += ledger->lines[i].bytes;
    }
    return bytes;
}

size_t ledger_total_bytes(const Ledger* ledger) {
    size_t bytes = 0;
    for (int i = 0; i < ledger->num_lines; i++) bytes += ledger->lines[i].bytes;
    return bytes;
}
