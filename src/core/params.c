// core/params.c - the tensor table. See params.h.
#include "core/params.h"

#include <stdlib.h>
#include <string.h>

int param_find(const ParamTable* table, const char* name) {
    for (int t = 0; t < table->num_tensors; t++) {
        if (strcmp(table->tensors[t].name, name) == 0) return t;
    }
    return -1;
}

void param_table_free(ParamTable* table) {
    free(table->tensors);
    free(table->unit_elems);
    memset(table, 0, sizeof(*table));
}
