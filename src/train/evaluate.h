// train/evaluate.h - validation loss and HellaSwag: many sequences over many ranks, one answer.
//
// Sequences are dealt out in passes of world_size * B; ranks without one run a masked batch, so
// that all make the same collective calls. Losses come back in sequence order: the result is the
// same for every number of ranks and every stage.
#ifndef TRAIN_EVALUATE_H
#define TRAIN_EVALUATE_H

#include "train/dataloader.h"
#include "train/hellaswag.h"
#include "train/step.h"

#ifdef __cplusplus
extern "C" {
#endif

// Mean token loss of the first num_sequences validation sequences. Bad data on any rank: false,
// with that rank's error. Collective.
bool evaluate_validation(Step* step, DataLoader* loader, uint64_t num_sequences, Comm* comm,
                         double* loss, Error* error);

// Examples answered rightly. Collective, as above.
bool evaluate_hellaswag(Step* step, HellaSwag* eval, Comm* comm, int* correct, Error* error);

#ifdef __cplusplus
}
#endif
#endif
