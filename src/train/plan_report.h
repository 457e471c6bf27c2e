// train/plan_report.h - the plan of a run: its memory by named line, its traffic, for any ranks and
// stage, on any machine.
//
// plan_ledger is the only place where the lines come together; the run allocates from the ledger
// that it fills, so `--plan` shows what the run takes. Figures are rank 0's, which also holds the
// buffer for saving.
#ifndef TRAIN_PLAN_REPORT_H
#define TRAIN_PLAN_REPORT_H

#include "core/ledger.h"
#include "gpt2/gpt2.h"
#include "train/options.h"
#include "zero/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// What the plan depends on. options are resolved for world_size (options_resolve).
typedef struct {
    const Options* options;
    GPT2Config model;
    int world_size, rank, threads;
    int zero_stage;
} PlanInput;

// Shapes, engine and backend sizes that follow from it: what gpt2_init, zero_create and ops_init
// take.
GPT2Shape plan_gpt2_shape(const PlanInput* input);
ZeroConfig plan_zero_config(const PlanInput* input);
OpsShape plan_ops_shape(const PlanInput* input);

// Fills an empty ledger with every line of that rank.
void plan_ledger(const PlanInput* input, Ledger* ledger);

// Is `text` a bare parameter count ("7.5B", "124M", "175b")?
bool plan_parameter_count(const char* text, double* num_params);

// --plan: the table or, with --json, one object on stdout. options->zero_stage may be
// ZERO_STAGE_ALL.
void plan_print(const Options* options, const GPT2Config* model, int ranks);
// The same for a bare parameter count: the paper's state, 2 + 2 + 12 bytes each.
void plan_print_count(const Options* options, double num_params, int ranks);

#ifdef __cplusplus
}
#endif
#endif
