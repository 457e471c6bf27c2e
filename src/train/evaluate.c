// train/evaluate.c - validation loss and HellaSwag. See evaluate.h.
#include "train/evaluate.h"

#include <stdlib.h>
#include <string.h>

// Where sequences come from: row `index` as inputs and targets (T).
typedef bool (*ReadRow)(void* source, uint64_t index, int* inputs, int* targets, Error* error);

// Summed token losses of rows 0 .. num_rows - 1, in order, on every rank.
static bool evaluate_rows(Step* step, ReadRow read, void* source, uint64_t num_rows, Comm* comm,
                          double* row_losses, Error* error) {
    int B = step->model->shape.B, T = step->model->shape.T;
    size_t row = (size_t)T, batch = (size_t)B * row,
           per_pass = (size_t)B * (size_t)comm->world_size;
    int* inputs = (int*)checked_malloc(2 * batch * sizeof(int));
    int* targets = inputs + batch;
    double* mine = (double*)checked_malloc((size_t)B * sizeof(double));
    double* all = (double*)checked_malloc(per_pass * sizeof(double));
    for (uint64_t first = 0; first < num_rows && error->code == 0; first += per_pass) {
        uint64_t mine_first = first + (uint64_t)comm->rank * (uint64_t)B;
        memset(inputs, 0, batch * sizeof(int));
        memset(targets, 0xFF, batch * sizeof(int)); // -1: masked
        for (int b = 0; b < B && mine_first + (uint64_t)b < num_rows && error->code == 0; b++) {
            read(source, mine_first + (uint64_t)b, inputs + (size_t)b * row,
                 targets + (size_t)b * row, error);
        }
        if (!comm_all_ok(comm, error)) break;
        step_eval(step, inputs, targets, B, T, mine);
        comm->host_all_gather(comm, all, mine, (size_t)B * sizeof(double));
        size_t count = min_size(per_pass, (size_t)(num_rows - first));
        memcpy(row_losses + first, all, count * sizeof(double));
    }
    zero_drop_slots(step->zero);
    free(inputs);
    free(mine);
    free(all);
    return error->code == 0;
}

static bool read_validation(void* source, uint64_t index, int* inputs, int* targets, Error* error) {
    return dataloader_val_sequence((DataLoader*)source, index, inputs, targets, error);
}

static bool read_hellaswag(void* source, uint64_t index, int* inputs, int* targets, Error* error) {
    return hellaswag_row((HellaSwag*)source, (int)index, inputs, targets, error);
}

bool evaluate_validation(Step* step, DataLoader* loader, uint64_t num_sequences, Comm* comm,
                         double* loss, Error* error) {
    double* losses = (double*)checked_malloc((size_t)num_sequences * sizeof(double));
    bool ok = evaluate_rows(step, read_validation, loader, num_sequences, comm, losses, error);
    double sum = 0;
    for (uint64_t i = 0; ok && i < num_sequences; i++) sum += losses[i];
    *loss = sum / ((double)num_sequences * step->model->shape.T);
    free(losses);
    return ok;
}

bool evaluate_hellaswag(Step* step, HellaSwag* eval, Comm* comm, int* correct, Error* error) {
    int rows = hellaswag_num_rows(eval);
    double* losses = (double*)checked_malloc((size_t)rows * sizeof(double));
    bool ok = evaluate_rows(step, read_hellaswag, eval, (uint64_t)rows, comm, losses, error);
    *correct = ok ? hellaswag_correct(eval, losses) : 0;
    free(losses);
    return ok;
}
