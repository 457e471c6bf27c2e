// train/run.c - opening a run, in the order in which things depend on each other. See run.h.
#include "train/run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/fault.h"
#include "core/rng.h"
#include "train/loss_scale.h"
#include "train/plan_report.h"
#include "train/signals.h"
#include "train/version.h"
#include "train/watchdog.h"

// ---- ranks --------------------------------------------------------------------------------------

static void start_ranks(Run* run, int argc, char** argv) {
    Error error = no_error;
    Options* o = &run->options;
    run->start_seconds = now_seconds();
    options_parse(o, argc, argv, &error);
    Error comm_error = no_error;
    CommOptions comm_options = options_comm(o);
    run->comm = comm_open(&comm_options, &comm_error);
    if (!run->comm) error_exit(&comm_error);
    watchdog_start(run->comm, o->comm_timeout);
    fault_init(run->comm->rank, &error);
    comm_agree(run->comm, &error);
    bool is_for_machines = wants_prompt(o) || o->json; // what goes to stdout
    report_init(&run->report, run->comm->rank != 0 ? NULL : is_for_machines ? stderr : stdout);
}

// What needs neither model nor device: prints it and says that the program is done.
static bool answer_question(const Run* run) {
    const Options* o = &run->options;
    if (!o->help && !o->version && !o->hash_file) return false;
    if (run->comm->rank != 0) return true;
    Error error = no_error;
    uint64_t hash;
    if (o->help)
        options_print_help();
    else if (o->version)
        printf("train_gpt2 %s (%s)\n", version_text, version_variant);
    else if (model_file_hash(o->hash_file, &hash, &error))
        printf("%016llx\n", (unsigned long long)hash);
    else
        error_exit(&error);
    return true;
}

// ---- model --------------------------------------------------------------------------------------

static bool is_rehearsal(const Options* o) { return o->plan || o->dry_run; }

// -e as a descriptor, a folder or a file. Opens model_file if it is one of the last two.
static bool read_model_option(Run* run, GPT2Config* config, Error* error) {
    const char* text = run->options.model ? run->options.model : DEFAULT_MODEL;
    const char* data = run->options.train_data;
    Error descriptor_error = no_error;
    struct stat st;
    bool is_descriptor, exists = run->comm->rank == 0 && stat(text, &st) == 0;
    run->comm->host_broadcast(run->comm, &exists, sizeof(exists), 0); // only rank 0 reads it
    bool ok = gpt2_config_parse(config, text, dataloader_default_vocab(data ? data : ""),
                                &is_descriptor, &descriptor_error);
    if (is_descriptor && exists && run->options.model)
        return error_set(error, EXIT_USAGE,
                         "-e %s names a size and also a path that exists: write ./%s for the path",
                         text, text);
    if (is_descriptor && !ok)
        return error_set(error, descriptor_error.code, "%s", descriptor_error.text);
    if (is_descriptor) return true;
    if (!exists)
        return error_set(error, descriptor_error.code, "%s%s", descriptor_error.text,
                         run->options.plan ? ", or a parameter count such as 7.5B" : "");
    if (!model_file_open(&run->model_file, text, run->comm, error)) return false;
    run->starts_from_file = true;
    *config = run->model_file.config;
    return true;
}

static void choose_model(Run* run) {
    Error error = no_error;
    Options* o = &run->options;
    bool writes = o->output_dir && !o->plan && !o->check_data && !wants_prompt(o);
    if (writes) checkpoint_open_out(o, run->comm, &error);
    comm_agree(run->comm, &error);

    if (o->resume && o->output_dir)
        checkpoint_find(o->output_dir, &run->state, run->checkpoint_dir, &run->is_resumed,
                        run->comm, &error);
    comm_agree(run->comm, &error);
    if (o->resume && !run->is_resumed)
        report_note(&run->report, "no checkpoint in %s: starting from scratch", o->output_dir);

    GPT2Config given;
    if (!run->is_resumed) {
        read_model_option(run, &run->config, &error);
    } else {
        given = run->config = run->state.model;
        state_fill_options(&run->state, o);
        if (o->model) read_model_option(run, &given, &error); // compared, not used
        run->starts_from_file = false;
        if (error.code == 0)
            state_check_resume(&run->state, &given, o, run->comm->world_size, &error);
    }
    comm_agree(run->comm, &error);
}

// ---- data ---------------------------------------------------------------------------------------

static bool open_shards(Run* run, DataLoader* loader, const char* option, const char* pattern,
                        uint64_t samples_per_step, bool* is_open, Error* error) {
    const Options* o = &run->options;
    DataConfig config = {option, pattern, o->seq_len, run->config.V, o->seed, samples_per_step};
    *is_open = dataloader_open(loader, &config, error);
    if (!*is_open && o->dry_run && !o->check_data && !dataloader_exists(pattern)) {
        warn("%s", error->text);
        *error = no_error;
        return true;
    }
    if (!*is_open) return false;
    return !o->check_data || dataloader_check(loader, error);
}

static void read_prompt(Run* run, Error* error) {
    const Options* o = &run->options;
    run->prompt =
        tokenizer_prompt(&run->tokenizer, o->prompt, o->prompt_tokens, &run->num_prompt, error);
    if (run->prompt && o->sample_tokens > run->config.T - run->num_prompt)
        error_set(error, EXIT_USAGE, "the prompt's %d tokens and -g %d exceed the model's T=%d",
                  run->num_prompt, o->sample_tokens, run->config.T);
}

static void open_data(Run* run) {
    Error error = no_error;
    Options* o = &run->options;
    int ranks = o->plan_ranks > 0 && is_rehearsal(o) ? o->plan_ranks : run->comm->world_size;
    options_resolve(o, &run->config, ranks, device_backend(), &error);
    comm_agree(run->comm, &error);

    long trained_with = run->starts_from_file ? run->model_file.total_batch_tokens : 0;
    if (trained_with > 0 && trained_with != o->total_batch_tokens && !wants_prompt(o) &&
        !option_given(o, "--lr-batch"))
        warn("%s was trained with %ld tokens a step, this run takes %ld: if -l was meant for the "
             "former, --lr-batch %ld scales it",
             o->model, trained_with, o->total_batch_tokens, trained_with);

    uint64_t samples_per_step = (uint64_t)(o->total_batch_tokens / o->seq_len);
    const char* hellaswag = o->hellaswag ? hellaswag_find() : NULL;
    if (o->hellaswag && !hellaswag)
        warn("no hellaswag_val.bin in data/hellaswag/ or dev/data/hellaswag/: HellaSwag is off");
    // -x 0 with HellaSwag, prompts and plans need no data.
    bool reads = !wants_prompt(o) && !o->plan;
    bool needs = reads && (o->check_data || !(o->max_steps == 0 && hellaswag));
    if (needs || (reads && dataloader_exists(o->train_data)))
        open_shards(run, &run->train, "-i", o->train_data, samples_per_step, &run->has_train,
                    &error);
    bool validates = o->val_every > 0 && o->val_max_batches != 0;
    bool wants_val = reads && o->val_data && (validates || o->check_data);
    bool needs_val = wants_val && (needs || option_given(o, "--val-data"));
    if (is_rehearsal(o) && !run->has_train) needs_val = false; // one warning is enough
    if (error.code == 0 && (needs_val || (wants_val && dataloader_exists(o->val_data))))
        open_shards(run, &run->val, "-j", o->val_data, 1, &run->has_val, &error);
    comm_agree(run->comm, &error);

    if (run->has_train) run->data_files = dataloader_identity(&run->train, &error);
    if (hellaswag && !wants_prompt(o))
        run->has_hellaswag =
            hellaswag_open(&run->hellaswag, hellaswag, o->seq_len, run->config.V, &error);
    const bool samples = o->sample_every > 0 && o->max_steps != 0;
    if (!o->plan && (wants_prompt(o) || samples)) {
        tokenizer_open(&run->tokenizer, o->tokenizer, o->train_data, run->config.V, &error);
        if (wants_prompt(o) && error.code == 0) read_prompt(run, &error);
        if (error.code == 0 && !tokenizer_has_text(&run->tokenizer))
            warn("no " TOKENIZER_FILE " beside the data or here, samples are printed as token ids; "
                 "python3 data/tokenizer.py makes it; or --tokenizer FILE");
    }
    comm_agree(run->comm, &error);

    run->max_steps = o->max_steps >= 0 ? o->max_steps
                     : run->has_train  ? dataloader_epoch_steps(&run->train)
                                       : 0;
}

// ---- where the run stands -----------------------------------------------------------------------

// Settles what a checkpoint will hold, from the options or from the one that was found.
static void set_state(Run* run) {
    Error error = no_error;
    const Options* o = &run->options;
    CheckpointState* s = &run->state;
    long samples_per_step = o->total_batch_tokens / o->seq_len;
    int num_files = run->has_train ? run->train.num_shards : 0;
    if (run->is_resumed) {
        bool same_data = state_check_data(s, run->data_files, num_files, &error);
        if (!same_data && o->allow_new_data) {
            error = no_error;
            s->samples = 0; // the order begins anew
        }
        comm_agree(run->comm, &error);
        // A run of fp32 or bf16 has stored 1; in another precision it goes on with that one's own.
        const bool unscaled = s->loss_scale == 1 && s->loss_scale_good_steps == 0;
        if (unscaled || FLOATX_DTYPE != DTYPE_FP16) {
            s->loss_scale = loss_scale_initial(FLOATX_DTYPE);
            s->loss_scale_good_steps = 0;
        }
        run->data_start = s->step - (long)s->samples / samples_per_step;
        state_free(s);
    } else {
        s->loss_scale = loss_scale_initial(FLOATX_DTYPE);
    }
    s->seed = o->seed;
    s->total_batch_tokens = o->total_batch_tokens;
    s->seq_len = o->seq_len;
    s->max_steps = run->max_steps;
    s->schedule = o->schedule;
    s->lr = options_scaled_lr(o);
    s->final_lr_frac = o->final_lr_frac;
    s->warmup_steps = o->warmup_steps;
    s->weight_decay = o->weight_decay;
    s->beta1 = o->beta1;
    s->beta2 = o->beta2;
    s->model = run->config;
    s->data_files = run->data_files;
    s->num_data_files = num_files;
    Schedule schedule = {o->schedule, options_scaled_lr(o), o->warmup_steps, run->max_steps,
                         o->final_lr_frac};
    run->schedule = schedule;
}

// ---- memory -------------------------------------------------------------------------------------

static PlanInput plan_input(const Run* run) {
    const Options* o = &run->options;
    const Comm* comm = run->comm;
    bool alone = o->dry_run && o->plan_ranks > 0;
    int ranks = alone ? o->plan_ranks : comm->world_size;
    PlanInput input = {o,
                       run->config,
                       ranks,
                       comm->rank,
                       device_threads(o->threads, alone ? ranks : comm->local_size),
                       o->zero_stage};
    return input;
}

// Every rank must have been given the same run: settings, sharding, and when all of them evaluate,
// sample and save.
static void compare_ranks(Run* run, const PlanInput* input) {
    Error error = no_error;
    const Options* o = &run->options;
    const ZeroConfig zero = plan_zero_config(input);
    const double others[] = {
        o->stop_at,      o->val_every,     o->val_max_batches, o->save_every,
        o->sample_every, o->sample_tokens, o->hellaswag,       o->skip_loss_z,
        o->skip_grad_z,  o->max_skips,     o->overfit_batch,   strcmp(o->on_nan, "skip") == 0,
        o->grad_clip,    o->adam_eps,      o->temperature,     o->top_k};
    ParamTable table;
    gpt2_param_table(&table, &run->config);
    uint64_t hash = mix64(state_hash(&run->state) + zero_config_hash(&zero, &table));
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        uint64_t bits;
        memcpy(&bits, &others[i], sizeof(bits));
        hash = mix64(hash + bits);
    }
    fault_check(&table, run->comm->world_size, &error);
    param_table_free(&table);
    comm_check_same(run->comm, hash, "the run's settings", &error);
    comm_agree(run->comm, &error);
}

static RunInfo describe(const Run* run, const PlanInput* input, const ParamTable* table) {
    const Options* o = &run->options;
    ZeroConfig zero = plan_zero_config(input);
    RunInfo info;
    memset(&info, 0, sizeof(info));
    info.options = o;
    info.version = version_text;
    info.precision = dtype_name(FLOATX_DTYPE);
    info.backend = device_backend();
    info.device = o->dry_run ? "not opened (dry run)" : device_description();
    info.transport = input->world_size > run->comm->world_size ? "mpi (dry run)" : run->comm->name;
    info.reduce = o->reduce;
    info.accum_dtype = o->accum_dtype;
    info.train_data = run->has_train ? o->train_data : NULL;
    info.val_data = run->has_val ? o->val_data : NULL;
    info.output_dir = o->output_dir;
    info.model_name = run->is_resumed ? run->checkpoint_dir : o->model ? o->model : DEFAULT_MODEL;
    info.fault = fault_description();
    info.ranks = input->world_size;
    info.threads = input->threads;
    info.zero_stage = o->zero_stage;
    info.recompute = o->recompute;
    info.model = run->config;
    info.num_parameters = table->num_params;
    info.batch = o->micro_batch;
    info.seq_len = o->seq_len;
    info.grad_accum_steps = o->grad_accum_steps;
    info.total_batch_tokens = o->total_batch_tokens;
    info.max_steps = run->max_steps;
    info.start_step = run->state.step;
    info.seed = o->seed;
    info.ledger = &run->ledger;
    zero_traffic(&zero, table, &info.elements_per_step, &info.bytes_per_step);
    return info;
}

static void open_device(Run* run) {
    Error error = no_error;
    CommOptions comm = options_comm(&run->options);
    DeviceOptions device =
        options_device(&run->options, run->comm->local_rank, run->comm->local_size);
    device_init(&device, &error);
    comm_agree(run->comm, &error);
    run->comm = comm_attach_device(run->comm, &comm, &error);
    comm_agree(run->comm, &error);
}

static void allocate(Run* run, const PlanInput* input) {
    const Options* o = &run->options;
    OpsShape ops_shape = plan_ops_shape(input);
    ZeroConfig zero_config = plan_zero_config(input);
    ops_init(&ops_shape, device_alloc(&run->ledger, "scratch"));
    run->zero = zero_create(&zero_config, &run->model.table, run->comm, &run->ledger);
    gpt2_alloc(&run->model, &run->ledger);
    step_init(&run->step, &run->model, run->zero, &run->ledger);
    checkpoint_init(&run->checkpoints, o, &run->model.table, run->comm, &run->ledger);
    device_alloc_freeze();
}

static void load_weights(Run* run) {
    Error error = no_error;
    CheckpointReport loaded;
    if (run->is_resumed)
        checkpoint_load(&run->checkpoints, run->checkpoint_dir, run->zero, &loaded, &error);
    else if (run->starts_from_file)
        model_file_load(&run->model_file, run->zero, &run->model.table, run->checkpoints.buffer,
                        run->checkpoints.buffer_elems, run->comm, &error);
    else
        zero_init_weights(run->zero, gpt2_init_range, run->options.seed);
    comm_agree(run->comm, &error);
    if (run->is_resumed)
        report_note(&run->report, "resumed at step %ld from %s (%.2f GB/s)", run->state.step,
                    run->checkpoint_dir, (double)loaded.bytes / loaded.ms * 1e-6);
}

// ---- all of it ----------------------------------------------------------------------------------

bool run_open(Run* run, int argc, char** argv) {
    Error error = no_error;
    Options* o = &run->options;
    start_ranks(run, argc, argv);
    if (answer_question(run)) return false;
    const int ranks = o->plan_ranks > 0 ? o->plan_ranks : run->comm->world_size; // of a plan
    double count;
    if (o->plan && o->model && plan_parameter_count(o->model, &count)) {
        if (run->comm->rank == 0) plan_print_count(o, count, ranks);
        return false;
    }
    choose_model(run);
    open_data(run);
    if (o->plan) {
        if (run->comm->rank == 0) plan_print(o, &run->config, ranks);
        return false;
    }
    if (o->check_data) {
        report_note(&run->report, "every token is below V=%d", run->config.V);
        return false;
    }
    set_state(run);
    PlanInput input = plan_input(run);
    compare_ranks(run, &input);
    bool stops_early = o->stop_at && o->stop_at < run->max_steps;
    long last_step = stops_early ? o->stop_at : run->max_steps;
    if (run->is_resumed && run->state.step >= last_step) {
        report_note(&run->report, "%s is already at step %ld of %s %ld: nothing to do",
                    run->checkpoint_dir, run->state.step, stops_early ? "--stop-at" : "-x",
                    last_step);
        // A crash may have come between the final checkpoint and its marker.
        if (run->state.step == run->max_steps && !is_rehearsal(o))
            checkpoint_mark_done(o->output_dir, run->max_steps, run->comm, &error);
        comm_agree(run->comm, &error);
        return false;
    }

    GPT2Shape shape = plan_gpt2_shape(&input);
    if (!o->dry_run) open_device(run);
    plan_ledger(&input, &run->ledger);
    gpt2_init(&run->model, &run->config, &shape);
    RunInfo info = describe(run, &input, &run->model.table);
    report_start(&run->report, &info);
    if (o->dry_run) return false;

    signals_install();
    allocate(run, &input);
    load_weights(run);
    if (o->output_dir && !wants_prompt(o)) {
        if (!run->is_resumed) checkpoint_start_anew(&run->checkpoints, !o->resume);
        if (run->comm->rank == 0)
            run->log = log_open(o->output_dir, run->is_resumed ? run->state.step : -1, &error);
    }
    comm_agree(run->comm, &error);
    log_start(run->log, &info);
    return true;
}

void run_close(Run* run) {
    checkpoint_free(&run->checkpoints);
    step_free(&run->step);
    zero_destroy(run->zero);
    gpt2_free(&run->model);
    run->comm->free(run->comm);
    ops_free();
    device_free_all();
    if (run->has_train) dataloader_close(&run->train);
    if (run->has_val) dataloader_close(&run->val);
    if (run->has_hellaswag) hellaswag_close(&run->hellaswag);
    tokenizer_close(&run->tokenizer);
    model_file_close(&run->model_file);
    free(run->prompt);
    free(run->data_files);
}
