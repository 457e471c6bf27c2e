// train/plan_report.c - the plan: filling the ledger, and printing it for any ranks and stages.
#include "train/plan_report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "train/checkpoint.h"
#include "train/generate.h"
#include "train/json_number.h"
#include "train/report.h"
#include "train/step.h"

// ---- what the run takes -------------------------------------------------------------------------

GPT2Shape plan_gpt2_shape(const PlanInput* input) {
    const Options* o = input->options;
    GPT2Shape shape = {0};
    shape.backward = !wants_prompt(o);
    shape.B = shape.backward ? o->micro_batch : 1;
    shape.T = shape.backward ? o->seq_len : (int)min_size(PREFILL_TOKENS, (size_t)input->model.T);
    shape.recompute = (Recompute)o->recompute;
    if (wants_prompt(o) || o->sample_every > 0) {
        // A prompt may fill the model's T; a sample is its start token and -g more.
        size_t tokens = wants_prompt(o) ? (size_t)input->model.T : (size_t)o->sample_tokens + 1;
        shape.cache_T = (int)min_size(tokens, (size_t)input->model.T);
        shape.cache_rows = (int)min_size(PREFILL_TOKENS, (size_t)shape.B * (size_t)shape.T);
    }
    return shape;
}

ZeroConfig plan_zero_config(const PlanInput* input) {
    const Options* o = input->options;
    ZeroConfig config = {0};
    config.stage = input->zero_stage;
    config.exact = strcmp(o->reduce, "exact") == 0;
    config.accum_dtype = strcmp(o->accum_dtype, "fp32") == 0 ? DTYPE_FP32 : FLOATX_DTYPE;
    config.grad_accum_steps = o->grad_accum_steps;
    config.world_size = input->world_size;
    config.rank = input->rank;
    config.training = !wants_prompt(o);
    return config;
}

OpsShape plan_ops_shape(const PlanInput* input) {
    GPT2Shape shape = plan_gpt2_shape(input);
    OpsShape ops = {0};
    ops.B = shape.B;
    ops.T = shape.T > shape.cache_T ? shape.T : shape.cache_T; // the cache's keys, too
    ops.C = input->model.C;
    ops.NH = input->model.NH;
    ops.Vp = gpt2_padded_vocab(&input->model);
    ops.threads = input->threads;
    ops.logits_rows = LOGITS_ROWS;
    ops.backward = shape.backward;
    ops.tf32 = input->options->tf32;
    ops.gelu_fusion = input->options->gelu_fusion;
    return ops;
}

void plan_ledger(const PlanInput* input, Ledger* ledger) {
    GPT2Shape shape = plan_gpt2_shape(input);
    ZeroConfig zero = plan_zero_config(input);
    OpsShape ops = plan_ops_shape(input);
    GPT2 model;
    gpt2_init(&model, &input->model, &shape);
    zero_plan(&zero, &model.table, ledger);
    gpt2_plan(&model, ledger);
    step_plan(ledger, shape.B, shape.T, zero.grad_accum_steps);
    ledger_add(ledger, MEM_TRANSIENT, "scratch", ops_scratch_bytes(&ops));
    checkpoint_plan(ledger, &model.table, input->rank);
    gpt2_free(&model);
}

// ---- a plan to print ----------------------------------------------------------------------------

enum { NUM_STAGES = 4 };

typedef struct {
    int stage;
    Ledger ledger;
    size_t elements, bytes; // sent by a rank in a step
    ZeroPrediction predicted;
} StagePlan;

typedef struct {
    const Options* options;
    int ranks, threads;
    size_t num_params, padded_params;
    double compute_ms; // of a step, at half the peak; 0: no peak is known
    int num_stages;
    StagePlan stages[NUM_STAGES];
} Plan;

// Stages that -z asks for: first ... last.
static void stage_range(const Options* options, int* first, int* last) {
    bool all = options->zero_stage == ZERO_STAGE_ALL;
    *first = all ? 0 : options->zero_stage;
    *last = all ? NUM_STAGES - 1 : options->zero_stage;
}

static void make_plan(Plan* plan, const Options* o, const GPT2Config* model, int ranks) {
    memset(plan, 0, sizeof *plan);
    plan->options = o;
    plan->ranks = ranks;
    plan->threads = device_threads(o->threads, ranks);
    if (o->peak_tflops > 0) {
        double flops = gpt2_flops_per_token(model, o->seq_len) * (double)o->total_batch_tokens;
        plan->compute_ms = flops / ranks / (0.5 * o->peak_tflops * 1e12) * 1e3;
    }
    ParamTable table;
    gpt2_param_table(&table, model);
    plan->num_params = table.num_params;
    plan->padded_params = zero_padded_params(&table, ranks);
    int first, last;
    stage_range(o, &first, &last);
    for (int stage = first; stage <= last; stage++) {
        StagePlan* s = &plan->stages[plan->num_stages++];
        PlanInput input = {o, *model, ranks, 0, plan->threads, stage};
        ZeroConfig config = plan_zero_config(&input);
        s->stage = stage;
        plan_ledger(&input, &s->ledger);
        zero_traffic(&config, &table, &s->elements, &s->bytes);
        if (o->link_gb_s > 0)
            s->predicted = zero_predict(&config, &table, o->link_gb_s, plan->compute_ms);
    }
    param_table_free(&table);
}

// ---- as JSON ------------------------------------------------------------------------------------

static void print_json(cJSON* object) {
    char* text = cJSON_PrintUnformatted(object);
    CHECK(text, "out of memory");
    puts(text);
    cJSON_free(text);
    cJSON_Delete(object);
}

static cJSON* new_plan_json(int ranks, size_t num_params, size_t padded, int threads) {
    cJSON* object = cJSON_CreateObject();
    json_add_int(object, "ranks", ranks);
    json_add_size(object, "num_parameters", num_params);
    json_add_size(object, "padded_parameters", padded);
    json_add_int(object, "threads", threads);
    cJSON_AddArrayToObject(object, "stages");
    return object;
}

// One stage; returns its "transient" object, to be filled.
static cJSON* add_stage_json(cJSON* plan, int stage, size_t weights, size_t grads, size_t optimizer,
                             size_t peak, size_t elements, size_t bytes) {
    cJSON* object = cJSON_CreateObject();
    cJSON_AddItemToArray(cJSON_GetObjectItem(plan, "stages"), object);
    json_add_int(object, "stage", stage);
    cJSON* state = cJSON_AddObjectToObject(object, "state");
    json_add_size(state, "weights", weights);
    json_add_size(state, "grads", grads);
    json_add_size(state, "optimizer", optimizer);
    cJSON* transient = cJSON_AddObjectToObject(object, "transient");
    json_add_size(object, "peak", peak);
    json_add_size(object, "elements_per_step", elements);
    json_add_size(object, "bytes_per_step", bytes);
    return transient;
}

static void print_plan_json(const Plan* plan) {
    cJSON* object =
        new_plan_json(plan->ranks, plan->num_params, plan->padded_params, plan->threads);
    for (int i = 0; i < plan->num_stages; i++) {
        const StagePlan* s = &plan->stages[i];
        const Ledger* ledger = &s->ledger;
        cJSON* transient = add_stage_json(object, s->stage, ledger_kind_bytes(ledger, MEM_WEIGHTS),
                                          ledger_kind_bytes(ledger, MEM_GRADS),
                                          ledger_kind_bytes(ledger, MEM_OPTIMIZER),
                                          ledger_total_bytes(ledger), s->elements, s->bytes);
        for (int l = 0; l < ledger->num_lines; l++)
            if (ledger->lines[l].kind == MEM_TRANSIENT)
                json_add_size(transient, ledger->lines[l].name, ledger->lines[l].bytes);
    }
    print_json(object);
}

// ---- as a table ---------------------------------------------------------------------------------

enum { COLUMN = 13 };

static void print_heading(const char* title, int first, int last) {
    printf("%-30s", title);
    for (int stage = first; stage <= last; stage++) printf("%*s %d", COLUMN - 2, "stage", stage);
    printf("\n");
}

// One row: the line of that name, or without one all lines of a kind, NUM_MEM_KINDS for the sum.
static void print_bytes_row(const Plan* plan, const char* name, const char* line, int kind) {
    printf("  %-28s", name);
    for (int i = 0; i < plan->num_stages; i++) {
        Ledger ledger = plan->stages[i].ledger;
        const LedgerLine* found = line ? ledger_find(&ledger, line) : NULL;
        size_t bytes = line                   ? (found ? found->bytes : 0)
                       : kind < NUM_MEM_KINDS ? ledger_kind_bytes(&ledger, (MemKind)kind)
                                              : ledger_total_bytes(&ledger);
        char text[REPORT_BYTES_CHARS];
        printf("%*s", COLUMN, bytes ? report_bytes((double)bytes, text) : "-");
    }
    printf("\n");
}

// Transient lines of all stages, each once; the last stage has most of them, so its order goes
// first.
static void print_transient_rows(const Plan* plan) {
    for (int i = plan->num_stages - 1; i >= 0; i--) {
        const Ledger* ledger = &plan->stages[i].ledger;
        for (int l = 0; l < ledger->num_lines; l++) {
            const LedgerLine* line = &ledger->lines[l];
            bool is_new = line->kind == MEM_TRANSIENT;
            for (int done = i + 1; done < plan->num_stages; done++) {
                Ledger other = plan->stages[done].ledger;
                if (ledger_find(&other, line->name)) is_new = false;
            }
            if (is_new) print_bytes_row(plan, line->name, line->name, 0);
        }
    }
}

static void print_prediction(const Plan* plan) {
    const Options* o = plan->options;
    const char* const names[] = {"gathering weights, ms", "reducing gradients, ms",
                                 "publishing weights, ms", "not hidden behind compute, ms"};
    printf("communication of a step at %.4g GB/s", o->link_gb_s);
    if (plan->compute_ms > 0)
        printf(", %.1f ms of compute at half of %.4g TFLOP/s\n", plan->compute_ms, o->peak_tflops);
    else
        printf("; with --peak-tflops X also what hides behind compute\n");
    int rows = plan->compute_ms > 0 ? 4 : 3;
    for (int r = 0; r < rows; r++) {
        printf("  %-28s", names[r]);
        for (int i = 0; i < plan->num_stages; i++) {
            const ZeroPrediction* p = &plan->stages[i].predicted;
            const double ms[] = {p->gather_ms, p->reduce_ms, p->publish_ms, p->exposed_ms};
            printf("%*.1f", COLUMN, ms[r]);
        }
        printf("\n");
    }
}

// The command that runs a stage of the plan.
static void print_command(const Options* o, int ranks, int stage) {
    const char* program = strcmp(device_backend(), "cuda") == 0 ? "train_gpt2cu" : "train_gpt2";
    printf("    ");
    if (ranks > 1) printf("mpirun -np %d ", ranks);
    printf("./%s -z %d", program, stage);
    options_print_given(o);
    printf("\n");
}

// Which stages fit into --memory-gb, given the bytes of each, and the command for the first.
static void print_fitting(const Options* o, int ranks, int first, int count, const double* bytes) {
    int fits = 0, lowest = -1;
    char list[64] = "";
    for (int i = 0; i < count; i++) {
        if (bytes[i] > o->memory_gb * 1e9) continue;
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%d", fits++ ? ", " : "", first + i);
        if (lowest < 0) lowest = first + i;
    }
    if (!fits) {
        printf("none of these stages fits into %.4g GB a rank: more ranks, a smaller -b or a "
               "higher -r\n",
               o->memory_gb);
        return;
    }
    bool can_run = o->grad_accum_steps > 0; // a bare parameter count is no model
    printf("stage%s %s fit%s into %.4g GB a rank; the lowest sends least%s\n", fits > 1 ? "s" : "",
           list, fits > 1 ? "" : "s", o->memory_gb, can_run ? ":" : "");
    if (can_run) print_command(o, ranks, lowest);
}

// A stage that shards more and yet needs more: its slots outweigh what few ranks save.
static void print_warnings(const Plan* plan) {
    for (int i = 1; i < plan->num_stages; i++) {
        size_t here = ledger_total_bytes(&plan->stages[i].ledger);
        size_t below = ledger_total_bytes(&plan->stages[i - 1].ledger);
        char text[REPORT_BYTES_CHARS];
        if (here > below)
            printf("stage %d needs %s more than stage %d here: its slots for whole units outweigh "
                   "what %d rank%s save%s\n",
                   plan->stages[i].stage, report_bytes((double)(here - below), text),
                   plan->stages[i - 1].stage, plan->ranks, plan->ranks == 1 ? "" : "s",
                   plan->ranks == 1 ? "s" : "");
    }
}

static void print_plan_table(const Plan* plan, const GPT2Config* m) {
    const Options* o = plan->options;
    printf("model L %d, NH %d, C %d, V %d, T %d: %zu parameters, %zu with padding\n", m->L, m->NH,
           m->C, m->V, m->T, plan->num_params, plan->padded_params);
    printf("B %d x T %d x accum %d x ranks %d = %ld tokens a step; %s, %s, %d thread%s a rank\n",
           o->micro_batch, o->seq_len, o->grad_accum_steps, plan->ranks, o->total_batch_tokens,
           device_backend(), dtype_name(FLOATX_DTYPE), plan->threads,
           plan->threads == 1 ? "" : "s");
    printf("reduce %s, accumulation in %s, recompute %d\n\n", o->reduce, o->accum_dtype,
           o->recompute);
    int first, last;
    stage_range(o, &first, &last);
    print_heading("memory of rank 0", first, last);
    print_bytes_row(plan, "weights", NULL, MEM_WEIGHTS);
    print_bytes_row(plan, "grads", NULL, MEM_GRADS);
    print_bytes_row(plan, "optimizer", NULL, MEM_OPTIMIZER);
    print_transient_rows(plan);
    print_bytes_row(plan, "peak", NULL, NUM_MEM_KINDS);
    printf("sent by a rank in a step\n  %-28s", "elements");
    for (int i = 0; i < plan->num_stages; i++) printf("%*zu", COLUMN, plan->stages[i].elements);
    printf("\n  %-28s", "bytes");
    for (int i = 0; i < plan->num_stages; i++) {
        char text[REPORT_BYTES_CHARS];
        printf("%*s", COLUMN, report_bytes((double)plan->stages[i].bytes, text));
    }
    printf("\n");
    if (o->link_gb_s > 0) print_prediction(plan);
    print_warnings(plan);
    if (o->memory_gb > 0) {
        double bytes[NUM_STAGES];
        for (int i = 0; i < plan->num_stages; i++)
            bytes[i] = (double)ledger_total_bytes(&plan->stages[i].ledger);
        print_fitting(o, plan->ranks, first, plan->num_stages, bytes);
    }
}

void plan_print(const Options* options, const GPT2Config* model, int ranks) {
    static Plan plan; // large
    make_plan(&plan, options, model, ranks);
    if (options->json)
        print_plan_json(&plan);
    else
        print_plan_table(&plan, model);
}

// ---- a bare parameter count ---------------------------------------------------------------------

bool plan_parameter_count(const char* text, double* num_params) {
    static const char suffixes[] = "KMBT";
    if (*text < '0' || *text > '9' || strpbrk(text, " xX")) return false;
    char* end;
    double value = strtod(text, &end);
    if (*end) {
        const char* suffix = strchr(suffixes, *end & ~0x20); // upper case
        if (!suffix || end[1]) return false;
        for (const char* s = suffixes; s <= suffix; s++) value *= 1000;
    }
    *num_params = round(value);
    return value >= 1 && value <= 1e18;
}

// The paper's model state with mixed-precision Adam: 2 bytes of weight, 2 of gradient, 12 of
// optimizer. Sent per step, as a share of the parameters, times (N-1)/N: 2, 2, 2, 3.
// Source: Rajbhandari et al. 2020, arXiv:1910.02054, sections 3.1, 5 and 7.
void plan_print_count(const Options* options, double num_params, int ranks) {
    const double psi = num_params, N = ranks;
    int first, last;
    stage_range(options, &first, &last);
    double parts[NUM_STAGES][3], totals[NUM_STAGES];
    cJSON* object = options->json ? new_plan_json(ranks, (size_t)psi, (size_t)psi,
                                                  device_threads(options->threads, ranks))
                                  : NULL;
    for (int stage = first; stage <= last; stage++) {
        double* part = parts[stage - first];
        part[0] = ceil(2 * psi / (stage >= 3 ? N : 1));
        part[1] = ceil(2 * psi / (stage >= 2 ? N : 1));
        part[2] = ceil(12 * psi / (stage >= 1 ? N : 1));
        totals[stage - first] = part[0] + part[1] + part[2];
        size_t elements = (size_t)round((stage == 3 ? 3 : 2) * psi * (N - 1) / N);
        if (object)
            add_stage_json(object, stage, (size_t)part[0], (size_t)part[1], (size_t)part[2],
                           (size_t)totals[stage - first], elements, 2 * elements);
    }
    if (object) {
        print_json(object);
        return;
    }
    static const char* const names[] = {"weights", "grads", "optimizer", "state"};
    printf("%.0f parameters on %d rank%s, mixed precision: model state of a rank, nothing else\n\n",
           psi, ranks, ranks == 1 ? "" : "s");
    print_heading("GB (1e9 bytes)", first, last);
    for (int r = 0; r < 5; r++) {
        bool is_gib = r == 4;
        printf("  %-28s", is_gib ? "state, GiB (2^30 bytes)" : names[r]);
        for (int i = 0; i <= last - first; i++) {
            double bytes = r < 3 ? parts[i][r] : totals[i];
            printf("%*.1f", COLUMN, bytes / (is_gib ? 1024.0 * 1024 * 1024 : 1e9));
        }
        printf("\n");
    }
    if (options->memory_gb > 0) print_fitting(options, ranks, first, last - first + 1, totals);
}
