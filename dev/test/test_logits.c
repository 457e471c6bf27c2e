// test_logits.c - logits of a model file.
//
//   test_logits MODEL ID...   prints the logits of every position, a line each
//   test_logits               checks itself: the key-value cache fed token by token and all at once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "testing.h"
#include "train/checkpoint.h"
#include "train/model_file.h"
#include "train/plan_report.h"
#include "train/step.h"

typedef struct {
    Options options;
    GPT2Config config;
    Comm* comm;
    Ledger ledger;
    GPT2 model;
    Zero* zero;
    Step step;
} Session;

// What a prompt needs, on one rank. Without a file the weights are random.
static void session_open(Session* s, const char* text, int num_tokens) {
    Error error = {0};
    ModelFile file = {0};
    char count[16], name[] = "test_logits";
    snprintf(count, sizeof(count), "%d", num_tokens);
    char* argv[] = {name, (char*)"--prompt-tokens", (char*)"0", (char*)"-g", count};
    s->comm = comm_self_create();
    bool is_descriptor, ok = options_parse(&s->options, 5, argv, &error) &&
                             gpt2_config_parse(&s->config, text, 257, &is_descriptor, &error);
    if (!ok && !is_descriptor) {
        error = (Error){0};
        ok = model_file_open(&file, text, s->comm, &error);
        s->config = file.config;
    }
    ok = ok && options_resolve(&s->options, &s->config, 1, device_backend(), &error);
    DeviceOptions device = {.local_size = 1, .quiet_affinity = true};
    if (!ok || !device_init(&device, &error)) error_exit(&error);

    PlanInput input = {&s->options, s->config, 1, 0, device_threads(0, 1), 0};
    GPT2Shape shape = plan_gpt2_shape(&input);
    OpsShape ops = plan_ops_shape(&input);
    ZeroConfig zero = plan_zero_config(&input);
    Checkpoints checkpoints;
    plan_ledger(&input, &s->ledger);
    gpt2_init(&s->model, &s->config, &shape);
    ops_init(&ops, device_alloc(&s->ledger, "scratch"));
    s->zero = zero_create(&zero, &s->model.table, s->comm, &s->ledger);
    gpt2_alloc(&s->model, &s->ledger);
    step_init(&s->step, &s->model, s->zero, &s->ledger);
    checkpoint_init(&checkpoints, &s->options, &s->model.table, s->comm, &s->ledger);
    if (!file.is_open) {
        zero_init_weights(s->zero, gpt2_init_range, 1);
        return;
    }
    if (!model_file_load(&file, s->zero, &s->model.table, checkpoints.buffer,
                         checkpoints.buffer_elems, s->comm, &error)) {
        error_exit(&error);
    }
    model_file_close(&file);
}

static void session_close(Session* s) {
    step_free(&s->step);
    zero_destroy(s->zero);
    gpt2_free(&s->model);
    ops_free();
    device_free_all();
    s->comm->free(s->comm);
}

static void print_logits(const char* model, char** ids, int num_ids) {
    static Session s;
    session_open(&s, model, num_ids);
    for (int i = 0; i < num_ids; i++) {
        int token = atoi(ids[i]);
        CHECK(token >= 0 && token < s.config.V && i < s.config.T, "token %d at %d", token, i);
        step_cached(&s.step, &token, i, 1);
        for (int v = 0; v < s.config.V; v++) printf("%.9g ", (double)s.step.logits_row[v]);
        printf("\n");
    }
    session_close(&s);
}

static void check_cache(void) {
    enum { N = 7 };
    static Session s;
    const int tokens[N] = {3, 1, 4, 1, 5, 9, 2};
    session_open(&s, "L=2,NH=3,C=48,V=257,T=16", N);
    for (int i = 0; i < N; i++) step_cached(&s.step, &tokens[i], i, 1);
    size_t V = (size_t)s.config.V;
    double *one_by_one = new_doubles(V), *at_once = new_doubles(V);
    for (size_t v = 0; v < V; v++) one_by_one[v] = (double)s.step.logits_row[v];
    step_cached(&s.step, tokens, 0, N);
    for (size_t v = 0; v < V; v++) at_once[v] = (double)s.step.logits_row[v];
    // Rounded to floatX about 6 times a layer on either way: (2 layers * 6 * 2 ways * u)^2.
    double u = FLOATX_DTYPE == DTYPE_FP32 ? 0x1p-24 : FLOATX_DTYPE == DTYPE_BF16 ? 0x1p-8 : 0x1p-11;
    test_close(at_once, one_by_one, V, pow(24 * u, 2), "token by token", "logits of %d tokens", N);
    free(one_by_one);
    free(at_once);
    session_close(&s);
}

int main(int argc, char** argv) {
    if (argc > 2) {
        print_logits(argv[1], argv + 2, argc - 2);
        return 0;
    }
    check_cache();
    return test_finish();
}
