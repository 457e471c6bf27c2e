// train/hellaswag.h - HellaSwag: four endings of a context, the likeliest of which should be the
// right one.
//
// Reads llm.c's evaluation file (magic 20240522, version 1). A row is one ending of one example:
// context and ending padded to T, with targets only on the ending. Rows are independent sequences,
// so any number of ranks can share them; the ending with the lowest mean loss per token is the
// answer. Source: Zellers et al. 2019, arXiv:1905.07830.
#ifndef TRAIN_HELLASWAG_H
#define TRAIN_HELLASWAG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "core/check.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { HELLASWAG_ENDINGS = 4 };

typedef struct {
    char path[512];
    int fd;
    uint64_t file_bytes;
    int T;
    int num_examples;
    uint64_t* offsets; // (num_examples) where each begins in the file
    int* labels;       // (num_examples) the right ending
    int* row_tokens;   // (num_examples * HELLASWAG_ENDINGS) tokens of each ending
    uint16_t* raw;     // one example as stored
} HellaSwag;

// hellaswag_val.bin in data/hellaswag/ or dev/data/hellaswag/; NULL: in neither.
const char* hellaswag_find(void);

// Reads and checks the whole file. False: code 2 with path, example, field and value.
bool hellaswag_open(HellaSwag* eval, const char* path, int T, int V, Error* error);
void hellaswag_close(HellaSwag* eval);

static inline int hellaswag_num_rows(const HellaSwag* eval) {
    return eval->num_examples * HELLASWAG_ENDINGS;
}

// Row 0 .. num_rows - 1: ending row % 4 of example row / 4. A context that is too long loses its
// beginning.  inputs, targets (T); targets are -1 outside the ending.
bool hellaswag_row(HellaSwag* eval, int row, int* inputs, int* targets, Error* error);

// Examples whose right ending has the lowest row_losses / row_tokens.
//   row_losses (num_rows) sum of token losses of each row
int hellaswag_correct(const HellaSwag* eval, const double* row_losses);

#ifdef __cplusplus
}
#endif
#endif
