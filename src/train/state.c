// train/state.c - state.json, config.json and the rules of resuming. See state.h.
#include "train/state.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "train/json.h"
#include "train/json_number.h"
#include "train/schedule.h"

enum { MAX_DATA_FILES = 100000 };

static const char* const file_names[NUM_CHECKPOINT_FILES] = {
    [CHECKPOINT_CONFIG] = "config.json",
    [CHECKPOINT_GENERATION] = "generation_config.json",
    [CHECKPOINT_MODEL] = "model.safetensors",
    [CHECKPOINT_OPTIMIZER] = "optimizer.safetensors",
};

const char* checkpoint_file_name(int file) { return file_names[file]; }

// ---- writing state.json -------------------------------------------------------------------------

static void add_outlier_values(cJSON* object, const char* key, const OutlierValues* outlier) {
    cJSON* array = cJSON_AddArrayToObject(object, key);
    for (int i = 0; i < outlier->count; i++) {
        char text[JSON_NUMBER_CHARS];
        json_number_text(outlier->values[i], text);
        cJSON_AddItemToArray(array, cJSON_CreateRaw(text));
    }
}

static void add_model(cJSON* root, const GPT2Config* model) {
    cJSON* object = cJSON_AddObjectToObject(root, "model");
    json_add_int(object, "L", model->L);
    json_add_int(object, "NH", model->NH);
    json_add_int(object, "C", model->C);
    json_add_int(object, "V", model->V);
    json_add_int(object, "T", model->T);
}

// A seed beyond 2^53 is a string: JSON readers hold numbers as doubles.
static void add_seed(cJSON* root, uint64_t seed) {
    if (seed <= (uint64_t)JSON_MAX_INTEGER) {
        json_add_size(root, "seed", seed);
        return;
    }
    char text[24];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)seed);
    cJSON_AddStringToObject(root, "seed", text);
}

char* state_to_json(const CheckpointState* state,
                    const CheckpointFile files[NUM_CHECKPOINT_FILES]) {
    cJSON* root = cJSON_CreateObject();
    json_add_int(root, "format", STATE_FORMAT);
    json_add_int(root, "step", state->step);
    json_add_int(root, "adam_t", state->adam_t);
    json_add_size(root, "samples", state->samples);
    add_seed(root, state->seed);
    json_add_int(root, "total_batch_tokens", state->total_batch_tokens);
    json_add_int(root, "seq_len", state->seq_len);
    json_add_int(root, "max_steps", state->max_steps);
    cJSON* schedule = cJSON_AddObjectToObject(root, "schedule");
    cJSON_AddStringToObject(schedule, "name", schedule_name(state->schedule));
    json_add_double(schedule, "lr", state->lr);
    json_add_int(schedule, "warmup", state->warmup_steps);
    json_add_double(schedule, "final_frac", state->final_lr_frac);
    json_add_double(root, "weight_decay", state->weight_decay);
    cJSON* betas = cJSON_AddArrayToObject(root, "betas");
    for (int i = 0; i < 2; i++) {
        char text[JSON_NUMBER_CHARS];
        json_number_text(i == 0 ? state->beta1 : state->beta2, text);
        cJSON_AddItemToArray(betas, cJSON_CreateRaw(text));
    }
    cJSON* loss_scale = cJSON_AddObjectToObject(root, "loss_scale");
    json_add_double(loss_scale, "scale", state->loss_scale);
    json_add_int(loss_scale, "good_steps", state->loss_scale_good_steps);
    cJSON* outlier = cJSON_AddObjectToObject(root, "outlier");
    add_outlier_values(outlier, "loss", &state->outlier_loss);
    add_outlier_values(outlier, "norm", &state->outlier_norm);
    add_model(root, &state->model);
    cJSON* data = cJSON_AddArrayToObject(cJSON_AddObjectToObject(root, "data"), "files");
    for (int i = 0; i < state->num_data_files; i++) {
        cJSON* file = cJSON_CreateObject();
        cJSON_AddItemToArray(data, file);
        cJSON_AddStringToObject(file, "name", state->data_files[i].name);
        json_add_size(file, "bytes", state->data_files[i].bytes);
        json_add_size(file, "crc32", state->data_files[i].crc32);
    }
    cJSON* list = cJSON_AddObjectToObject(root, "files");
    for (int i = 0; i < NUM_CHECKPOINT_FILES; i++) {
        cJSON* file = cJSON_AddObjectToObject(list, file_names[i]);
        json_add_size(file, "bytes", files[i].bytes);
        json_add_size(file, "crc32", files[i].crc32);
    }
    char* text = cJSON_Print(root);
    CHECK(text, "out of host memory for state.json");
    cJSON_Delete(root);
    return text;
}

uint64_t state_hash(const CheckpointState* state) {
    const CheckpointFile none[NUM_CHECKPOINT_FILES] = {{0}};
    char* text = state_to_json(state, none);
    uint64_t hash = 0;
    for (const char* c = text; *c; c++) hash = mix64(hash + (unsigned char)*c + 1);
    free(text);
    return hash;
}

// ---- reading state.json -------------------------------------------------------------------------

static void get_outlier_values(OutlierValues* out, const cJSON* object, const char* key,
                               JsonContext c) {
    const cJSON* array = json_get_array(object, key, OUTLIER_WINDOW, c);
    for (const cJSON* v = array ? array->child : NULL; v; v = v->next) {
        out->values[out->count++] = json_check_number(v, key, -DBL_MAX, DBL_MAX, c);
    }
}

static uint64_t get_seed(const cJSON* root, JsonContext c) {
    const cJSON* value = cJSON_GetObjectItemCaseSensitive(root, "seed");
    if (!cJSON_IsString(value))
        return (uint64_t)json_get_integer(root, "seed", 0, JSON_MAX_INTEGER, c);
    const char* text = value->valuestring;
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || text[digits] != '\0' || digits > 20) {
        error_set(c.error, EXIT_USAGE, "%s: seed is not a number", c.where);
        return 0;
    }
    return strtoull(text, NULL, 10);
}

static int get_int(const cJSON* object, const char* key, JsonContext c) {
    return (int)json_get_integer(object, key, 1, INT32_MAX, c);
}

static void get_data_files(CheckpointState* state, const cJSON* root, JsonContext c) {
    const cJSON* array =
        json_get_array(json_get_object(root, "data", c), "files", MAX_DATA_FILES, c);
    if (!array) return;
    state->data_files = checked_calloc((size_t)cJSON_GetArraySize(array), sizeof(DataFile));
    for (const cJSON* entry = array->child; entry; entry = entry->next) {
        DataFile* file = &state->data_files[state->num_data_files++];
        const char* name = json_get_string(entry, "name", c);
        if (strlen(name) >= sizeof(file->name)) {
            error_set(c.error, EXIT_USAGE, "%s: the name of a data file is too long", c.where);
            return;
        }
        snprintf(file->name, sizeof(file->name), "%s", name);
        file->bytes = (uint64_t)json_get_integer(entry, "bytes", 0, JSON_MAX_INTEGER, c);
        file->crc32 = (uint32_t)json_get_integer(entry, "crc32", 0, UINT32_MAX, c);
    }
}

static void get_schedule(CheckpointState* state, const cJSON* root, JsonContext c) {
    const cJSON* schedule = json_get_object(root, "schedule", c);
    const char* name = json_get_string(schedule, "name", c);
    if (c.error->code == 0 && !schedule_from_name(name, &state->schedule)) {
        error_set(c.error, EXIT_USAGE, "%s: unknown schedule '%.40s'", c.where, name);
    }
    state->lr = json_get_number(schedule, "lr", 0, DBL_MAX, c);
    state->warmup_steps = json_get_integer(schedule, "warmup", 0, JSON_MAX_INTEGER, c);
    state->final_lr_frac = json_get_number(schedule, "final_frac", 0, DBL_MAX, c);
}

static void get_fields(CheckpointState* state, CheckpointFile files[NUM_CHECKPOINT_FILES],
                       const cJSON* root, JsonContext c) {
    json_get_integer(root, "format", STATE_FORMAT, STATE_FORMAT, c);
    state->step = json_get_integer(root, "step", 1, JSON_MAX_INTEGER, c);
    state->adam_t = json_get_integer(root, "adam_t", 0, state->step, c);
    state->samples = (uint64_t)json_get_integer(root, "samples", 0, JSON_MAX_INTEGER, c);
    state->seed = get_seed(root, c);
    state->total_batch_tokens =
        json_get_integer(root, "total_batch_tokens", 1, JSON_MAX_INTEGER, c);
    state->seq_len = get_int(root, "seq_len", c);
    state->max_steps = json_get_integer(root, "max_steps", 0, JSON_MAX_INTEGER, c);
    get_schedule(state, root, c);
    state->weight_decay = json_get_number(root, "weight_decay", 0, DBL_MAX, c);
    const cJSON* betas = json_get_array(root, "betas", 2, c);
    if (betas && cJSON_GetArraySize(betas) != 2) {
        error_set(c.error, EXIT_USAGE, "%s: betas needs 2 numbers", c.where);
    } else if (betas) {
        state->beta1 = json_check_number(betas->child, "betas[0]", 0, 1, c);
        state->beta2 = json_check_number(betas->child->next, "betas[1]", 0, 1, c);
    }
    const cJSON* loss_scale = json_get_object(root, "loss_scale", c);
    state->loss_scale = json_get_number(loss_scale, "scale", 0, DBL_MAX, c);
    state->loss_scale_good_steps =
        json_get_integer(loss_scale, "good_steps", 0, JSON_MAX_INTEGER, c);
    const cJSON* outlier = json_get_object(root, "outlier", c);
    get_outlier_values(&state->outlier_loss, outlier, "loss", c);
    get_outlier_values(&state->outlier_norm, outlier, "norm", c);
    const cJSON* model = json_get_object(root, "model", c);
    state->model.L = get_int(model, "L", c);
    state->model.NH = get_int(model, "NH", c);
    state->model.C = get_int(model, "C", c);
    state->model.V = get_int(model, "V", c);
    state->model.T = get_int(model, "T", c);
    get_data_files(state, root, c);
    const cJSON* list = json_get_object(root, "files", c);
    for (int i = 0; i < NUM_CHECKPOINT_FILES; i++) {
        const cJSON* file = json_get_object(list, file_names[i], c);
        files[i].bytes = (uint64_t)json_get_integer(file, "bytes", 0, JSON_MAX_INTEGER, c);
        files[i].crc32 = (uint32_t)json_get_integer(file, "crc32", 0, UINT32_MAX, c);
    }
}

bool state_from_json(CheckpointState* state, CheckpointFile files[NUM_CHECKPOINT_FILES],
                     const char* text, size_t length, const char* where, Error* error) {
    memset(state, 0, sizeof(*state));
    JsonContext c = {where, error};
    cJSON* root = json_parse(text, length, c);
    if (!root) return false;
    get_fields(state, files, root, c);
    cJSON_Delete(root);
    bool ok = error->code == 0 && gpt2_config_check(&state->model, where, error);
    if (ok && state->seq_len > state->model.T) {
        ok = error_set(error, EXIT_USAGE, "%s: seq_len %d is beyond the model's T %d", where,
                       state->seq_len, state->model.T);
    }
    if (ok && state->total_batch_tokens % state->seq_len != 0) {
        ok = error_set(error, EXIT_USAGE,
                       "%s: total_batch_tokens %ld is not a multiple of seq_len %d", where,
                       state->total_batch_tokens, state->seq_len);
    }
    if (!ok) state_free(state);
    return ok;
}

void state_free(CheckpointState* state) {
    free(state->data_files);
    state->data_files = NULL;
    state->num_data_files = 0;
}

// ---- resuming -----------------------------------------------------------------------------------

// True if the stored value is to be used; a line for a given one that differs.
static bool use_stored(const Options* options, const char* name, double given, double stored) {
    if (!option_given(options, name)) return true;
    if (given != stored) warn("%s %g is used; the stored run had %g", name, given, stored);
    return false;
}

void state_fill_options(const CheckpointState* s, Options* o) {
    if (!option_given(o, "--seq-len")) o->seq_len = s->seq_len;
    if (!option_given(o, "--total-batch-tokens")) o->total_batch_tokens = s->total_batch_tokens;
    if (use_stored(o, "--max-steps", (double)o->max_steps, (double)s->max_steps)) {
        o->max_steps = s->max_steps;
    }
    if (use_stored(o, "--lr", options_scaled_lr(o), s->lr)) {
        o->lr = s->lr; // as scaled by --lr-batch
        o->lr_batch_tokens = 0;
    }
    if (!option_given(o, "--schedule")) {
        o->schedule = s->schedule;
    } else if (o->schedule != s->schedule) {
        warn("--schedule %s is used; the stored run had %s", schedule_name(o->schedule),
             schedule_name(s->schedule));
    }
    if (use_stored(o, "--warmup-steps", (double)o->warmup_steps, (double)s->warmup_steps)) {
        o->warmup_steps = s->warmup_steps;
    }
    if (use_stored(o, "--final-lr-frac", o->final_lr_frac, s->final_lr_frac)) {
        o->final_lr_frac = s->final_lr_frac;
    }
    if (use_stored(o, "--weight-decay", o->weight_decay, s->weight_decay)) {
        o->weight_decay = s->weight_decay;
    }
    if (use_stored(o, "--beta1", o->beta1, s->beta1)) o->beta1 = s->beta1;
    if (use_stored(o, "--beta2", o->beta2, s->beta2)) o->beta2 = s->beta2;
    if (!option_given(o, "--seed")) {
        o->seed = s->seed;
    } else if (o->seed != s->seed) {
        warn("--seed %llu is used; the stored run had %llu", (unsigned long long)o->seed,
             (unsigned long long)s->seed);
    }
}

// The first n for which n * other divides `sequences`, as text: "1, 2, 4", or "".
static void list_divisors(char* text, size_t size, long sequences, long other) {
    size_t used = 0;
    text[0] = '\0';
    for (long n = 1, found = 0; n <= sequences / other && found < 8; n++) {
        if (sequences % (n * other) != 0) continue;
        used += (size_t)snprintf(text + used, size - used, "%s%ld", found > 0 ? ", " : "", n);
        if (used >= size) return;
        found++;
    }
}

static bool check_total_batch(const CheckpointState* stored, const Options* options, int world_size,
                              Error* error) {
    long T = stored->seq_len, B = options->micro_batch, total = stored->total_batch_tokens;
    if (options->total_batch_tokens != total) {
        return error_set(error, EXIT_USAGE,
                         "-d %ld, but the checkpoint's total batch is %ld tokens; leave -d out",
                         options->total_batch_tokens, total);
    }
    long per_micro_step = B * T * world_size;
    if (total % per_micro_step == 0) return true;
    char micro_batches[120], ranks[120];
    list_divisors(micro_batches, sizeof(micro_batches), total / T, world_size);
    list_divisors(ranks, sizeof(ranks), total / T, B);
    long below = total / per_micro_step * per_micro_step;
    char nearest[64] = "", advice[320] = "";
    if (below > 0) snprintf(nearest, sizeof(nearest), "%ld and ", below);
    int n = 0;
    if (micro_batches[0])
        n = snprintf(advice, sizeof(advice), "; it goes on with %d ranks and -b %s", world_size,
                     micro_batches);
    if (ranks[0])
        snprintf(advice + n, sizeof(advice) - (size_t)n, "%s with -b %ld and ranks %s",
                 n ? ", or" : "; it goes on", B, ranks);
    return error_set(
        error, EXIT_USAGE,
        "the checkpoint's total batch of %ld tokens is not a multiple of -b %ld x -t %ld x "
        "%d ranks = %ld, as %s%ld would be%s",
        total, B, T, world_size, per_micro_step, nearest, below + per_micro_step, advice);
}

bool state_check_resume(const CheckpointState* stored, const GPT2Config* model,
                        const Options* options, int world_size, Error* error) {
    const GPT2Config *a = &stored->model, *b = model;
    if (a->L != b->L || a->NH != b->NH || a->C != b->C || a->V != b->V || a->T != b->T) {
        return error_set(error, EXIT_USAGE,
                         "the checkpoint's model is L=%d,NH=%d,C=%d,V=%d,T=%d, but -e says "
                         "L=%d,NH=%d,C=%d,V=%d,T=%d; leave -e out, or start anew in another -o",
                         a->L, a->NH, a->C, a->V, a->T, b->L, b->NH, b->C, b->V, b->T);
    }
    if (options->seq_len != stored->seq_len) {
        return error_set(error, EXIT_USAGE,
                         "-t %d, but the checkpoint was trained with %d; leave -t out",
                         options->seq_len, stored->seq_len);
    }
    return check_total_batch(stored, options, world_size, error);
}

bool state_check_data(const CheckpointState* stored, const DataFile* files, int num_files,
                      Error* error) {
    static const char fix[] = "--allow-new-data goes on with a new order";
    if (num_files != stored->num_data_files) {
        return error_set(error, EXIT_USAGE,
                         "%d training files, but the checkpoint was trained on %d; %s", num_files,
                         stored->num_data_files, fix);
    }
    for (int i = 0; i < num_files; i++) {
        const DataFile *now = &files[i], *then = &stored->data_files[i];
        if (strcmp(now->name, then->name) != 0 || now->bytes != then->bytes ||
            now->crc32 != then->crc32) {
            return error_set(
                error, EXIT_USAGE,
                "training file %s (%llu bytes, crc32 %08x) is not the checkpoint's %s (%llu "
                "bytes, crc32 %08x); %s",
                now->name, (unsigned long long)now->bytes, now->crc32, then->name,
                (unsigned long long)then->bytes, then->crc32, fix);
        }
    }
    return true;
}

// ---- config.json --------------------------------------------------------------------------------

char* config_to_json(const GPT2Config* config) {
    char* text = NULL;
    int n = asprintf(&text,
                     "{\n"
                     "  \"architectures\": [\n    \"GPT2LMHeadModel\"\n  ],\n"
                     "  \"model_type\": \"gpt2\",\n"
                     "  \"vocab_size\": %d,\n  \"n_positions\": %d,\n  \"n_ctx\": %d,\n"
                     "  \"n_embd\": %d,\n  \"n_layer\": %d,\n  \"n_head\": %d,\n"
                     "  \"n_inner\": null,\n"
                     "  \"activation_function\": \"gelu_new\",\n"
                     "  \"layer_norm_epsilon\": 1e-05,\n  \"initializer_range\": 0.02,\n"
                     "  \"attn_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n  \"resid_pdrop\": 0.0,\n"
                     "  \"scale_attn_weights\": true,\n  \"tie_word_embeddings\": true,\n"
                     "  \"use_cache\": true,\n"
                     "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d,\n"
                     "  \"torch_dtype\": \"float32\"\n"
                     "}\n",
                     config->V, config->T, config->T, config->C, config->L, config->NH,
                     config->V - 1, config->V - 1);
    CHECK(n >= 0, "out of host memory for config.json");
    return text;
}

char* generation_config_to_json(const GPT2Config* config) {
    char* text = NULL;
    int n = asprintf(&text,
                     "{\n  \"_from_model_config\": true,\n  \"bos_token_id\": %d,\n"
                     "  \"eos_token_id\": %d\n}\n",
                     config->V - 1, config->V - 1);
    CHECK(n >= 0, "out of host memory for generation_config.json");
    return text;
}

// Absent keys have transformers' default, which is what this model computes.
static void refuse_unless(bool fits, const cJSON* value, const char* key, const char* expected,
                          JsonContext c) {
    if (!value || fits) return;
    char* found = cJSON_PrintUnformatted(value);
    error_set(c.error, EXIT_USAGE, "%s: %s is %.60s, this trainer computes %s only", c.where, key,
              found ? found : "unreadable", expected);
    cJSON_free(found);
}

static void refuse_unless_string(const cJSON* root, const char* key, const char* expected,
                                 JsonContext c) {
    const cJSON* value = cJSON_GetObjectItemCaseSensitive(root, key);
    char text[40];
    snprintf(text, sizeof(text), "\"%s\"", expected);
    refuse_unless(cJSON_IsString(value) && strcmp(value->valuestring, expected) == 0, value, key,
                  text, c);
}

static void refuse_unless_bool(const cJSON* root, const char* key, bool expected, JsonContext c) {
    const cJSON* value = cJSON_GetObjectItemCaseSensitive(root, key);
    refuse_unless(expected ? cJSON_IsTrue(value) : cJSON_IsFalse(value), value, key,
                  expected ? "true" : "false", c);
}

static void refuse_unless_number(const cJSON* root, const char* key, double expected,
                                 JsonContext c) {
    const cJSON* value = cJSON_GetObjectItemCaseSensitive(root, key);
    char text[40];
    snprintf(text, sizeof(text), "%g", expected);
    refuse_unless(cJSON_IsNumber(value) && value->valuedouble == expected, value, key, text, c);
}

bool config_from_json(GPT2Config* config, const char* text, size_t length, const char* where,
                      Error* error) {
    memset(config, 0, sizeof(*config));
    JsonContext c = {where, error};
    cJSON* root = json_parse(text, length, c);
    if (!root) return false;
    refuse_unless_string(root, "model_type", "gpt2", c);
    config->V = get_int(root, "vocab_size", c);
    config->T = get_int(root, "n_positions", c);
    config->C = get_int(root, "n_embd", c);
    config->L = get_int(root, "n_layer", c);
    config->NH = get_int(root, "n_head", c);
    const cJSON* n_inner = cJSON_GetObjectItemCaseSensitive(root, "n_inner");
    if (n_inner && !cJSON_IsNull(n_inner))
        refuse_unless_number(root, "n_inner", 4.0 * config->C, c);
    refuse_unless_string(root, "activation_function", "gelu_new", c);
    refuse_unless_number(root, "layer_norm_epsilon", 1e-5, c);
    refuse_unless_bool(root, "scale_attn_weights", true, c);
    refuse_unless_bool(root, "tie_word_embeddings", true, c);
    refuse_unless_bool(root, "scale_attn_by_inverse_layer_idx", false, c);
    refuse_unless_bool(root, "reorder_and_upcast_attn", false, c);
    refuse_unless_bool(root, "add_cross_attention", false, c);
    cJSON_Delete(root);
    return error->code == 0 && gpt2_config_check(config, where, error);
}
