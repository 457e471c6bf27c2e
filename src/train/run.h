// train/run.h - everything one run holds, from its options to its weights.
//
// run_open settles a run step by step and checks each before the next: options, ranks, model, data,
// where it stands, memory, weights. What a user got wrong ends all ranks with one line on the way.
// train_gpt2.cu then turns the loop.
#ifndef TRAIN_RUN_H
#define TRAIN_RUN_H

#include <limits.h>

#include "train/checkpoint.h"
#include "train/dataloader.h"
#include "train/hellaswag.h"
#include "train/log.h"
#include "train/model_file.h"
#include "train/report.h"
#include "train/schedule.h"
#include "train/step.h"

#ifdef __cplusplus
extern "C" {
#endif

static const Error no_error = {0, ""};

typedef struct {
    Options options;
    Comm* comm;
    // what is trained
    GPT2Config config;
    ModelFile model_file; // -e DIR|FILE
    bool starts_from_file, is_resumed;
    char checkpoint_dir[PATH_MAX];
    // on what
    DataLoader train, val;
    bool has_train, has_val, has_hellaswag;
    HellaSwag hellaswag;
    Tokenizer tokenizer;
    int* prompt; // (num_prompt) token ids; NULL: the run trains
    int num_prompt;
    DataFile* data_files; // (train.num_shards) identity of the training data
    // with what
    Ledger ledger;
    GPT2 model;
    Zero* zero;
    Step step;
    Checkpoints checkpoints;
    // how far: what a checkpoint stores of it is in `state`
    CheckpointState state;
    long data_start;    // steps done when the data order began
    long max_steps;     // -x, or one epoch
    int skips_in_a_row; // nonfinite and overflow
    int signal;         // that some rank has received
    Schedule schedule;
    Report report;
    Log* log;
    double start_seconds;
} Run;

// Fills a zeroed run. False: the command line was a question (--help, --plan, ...) and is answered,
// or there is nothing to do. Then the program is at its end and frees no more than run->comm.
bool run_open(Run* run, int argc, char** argv);
void run_close(Run* run);

#ifdef __cplusplus
}
#endif
#endif
