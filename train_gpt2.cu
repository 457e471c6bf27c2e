// train_gpt2.cu - trains GPT-2 on one CPU, one GPU or many ranks with ZeRO stage 0 to 3.
//
//   ./train_gpt2 -i text.txt -e L=4,NH=4,C=128,T=128 -x 200 -o out
//   mpirun -np 8 ./train_gpt2cu -z 2
//
// main() opens a run (src/train/run.c: options, ranks, model, data, memory, weights) and train()
// turns its loop; train_step() is one turn. What that calls is in src/train/step.c (the loop over
// units), src/gpt2/ (the model), zero/ (the sharding engine) and src/backend/ (the operations). The
// C compiler makes train_gpt2 (CPU) of this file and nvcc makes train_gpt2cu (CUDA) of it.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/evaluate.h"
#include "train/generate.h"
#include "train/run.h"
#include "train/signals.h"
#include "train/verdict.h"
#include "train/watchdog.h"

// ---- one step -----------------------------------------------------------------------------------

// Buffers and marks of the loop.
typedef struct {
    int *inputs, *targets; // (B, T) host
    event_t* marks;        // (2 G + 1) begin, and the ends of each forward and backward
} Loop;

static void loop_init(Loop* loop, const Options* o) {
    size_t batch = (size_t)o->micro_batch * (size_t)o->seq_len;
    int num_marks = 2 * o->grad_accum_steps + 1;
    loop->inputs = (int*)checked_malloc(2 * batch * sizeof(int));
    loop->targets = loop->inputs + batch;
    loop->marks = (event_t*)checked_malloc((size_t)num_marks * sizeof(event_t));
    for (int i = 0; i < num_marks; i++) loop->marks[i] = event_create();
}

static void loop_free(Loop* loop, const Options* o) {
    for (int i = 0; i < 2 * o->grad_accum_steps + 1; i++) event_destroy(loop->marks[i]);
    free(loop->marks);
    free(loop->inputs);
}

// The gradients of the whole global batch, reduced, and the step's one message.
static StepMessage accumulate_gradients(Run* run, long step, Loop* loop) {
    const Options* o = &run->options;
    const Comm* comm = run->comm;
    float dloss = (float)(run->state.loss_scale / (double)o->total_batch_tokens);
    long data_step = o->overfit_batch ? 1 : step - run->data_start;
    run->step.number = step;
    event_record(loop->marks[0], STREAM_COMPUTE);
    for (int micro = 0; micro < o->grad_accum_steps; micro++) {
        Error error = no_error;
        if (!dataloader_batch(&run->train, data_step, micro, comm->rank, comm->world_size,
                              o->micro_batch, loop->inputs, loop->targets, &error))
            error_exit(&error);
        step_forward(&run->step, loop->inputs, loop->targets, micro);
        event_record(loop->marks[2 * micro + 1], STREAM_COMPUTE);
        step_backward(&run->step, dloss, micro);
        event_record(loop->marks[2 * micro + 2], STREAM_COMPUTE);
    }
    return zero_grad_norm(run->zero, run->step.micro_losses, (size_t)o->total_batch_tokens,
                          run->state.loss_scale, signals_received());
}

static AdamW adamw_of_step(const Run* run, long step, double grad_norm) {
    const Options* o = &run->options;
    double t = (double)(run->state.adam_t + 1);
    AdamW adamw = {(float)schedule_lr(&run->schedule, step),
                   (float)o->beta1,
                   (float)o->beta2,
                   (float)o->adam_eps,
                   (float)o->weight_decay,
                   (float)(1.0 - pow(o->beta1, t)),
                   (float)(1.0 - pow(o->beta2, t)),
                   (float)(clip_coefficient(grad_norm, o->grad_clip) / run->state.loss_scale)};
    return adamw;
}

// For log and reader: the step that began and whose update began at those times.
static void report_this_step(Run* run, long step, const StepMessage* message,
                             const Verdict* verdict, const Loop* loop, double begin,
                             double update_begin) {
    const Options* o = &run->options;
    double end = now_seconds(), rate = (double)o->total_batch_tokens / (end - begin);
    double peak = o->peak_tflops > 0 ? o->peak_tflops : device_peak_tflops();
    StepInfo info;
    memset(&info, 0, sizeof(info));
    info.step = step;
    info.loss = message->loss;
    info.grad_norm = message->grad_norm;
    info.lr = schedule_lr(&run->schedule, step);
    info.loss_scale = FLOATX_DTYPE == DTYPE_FP16 ? run->state.loss_scale : 0;
    info.skipped = verdict->skipped;
    info.ms = (end - begin) * 1e3;
    for (int micro = 0; micro < o->grad_accum_steps; micro++) {
        const event_t* mark = &loop->marks[2 * micro];
        info.forward_ms += event_elapsed_ms(mark[0], mark[1]);
        info.backward_ms += event_elapsed_ms(mark[1], mark[2]);
    }
    info.update_ms = (end - update_begin) * 1e3;
    info.comm_wait_ms = run->comm->wait_seconds * 1e3;
    info.tokens = (uint64_t)step * (uint64_t)o->total_batch_tokens;
    info.tokens_per_s = rate;
    info.mfu = peak > 0 ? gpt2_flops_per_token(&run->config, o->seq_len) * rate /
                              (peak * 1e12 * run->comm->world_size)
                        : (double)NAN;
    zero_take_counters(run->zero, &info.elements_sent, &info.bytes_sent);
    log_step(run->log, &info);
    report_step(&run->report, &info);
}

// One turn of the loop. A step that stops the run has changed nothing.
static VerdictKind train_step(Run* run, long step, Loop* loop) {
    const Options* o = &run->options;
    CheckpointState* s = &run->state;
    double begin = now_seconds();
    run->comm->wait_seconds = 0;
    StepMessage message = accumulate_gradients(run, step, loop);
    Verdict verdict = verdict_of_step(&message, s, o, step, run->skips_in_a_row);
    run->signal = message.signal;
    if (verdict.kind == VERDICT_STOP) {
        if (run->comm->rank == 0) fprintf(stderr, "error: %s\n", verdict.text);
        return VERDICT_STOP;
    }
    if (verdict.text[0]) warn("%s", verdict.text);

    double update_begin = now_seconds();
    AdamW adamw = adamw_of_step(run, step, message.grad_norm);
    if (verdict.kind == VERDICT_UPDATE)
        zero_step(run->zero, &adamw);
    else
        zero_skip(run->zero);
    report_this_step(run, step, &message, &verdict, loop, begin, update_begin);

    verdict_book(&verdict, &message, s, &run->skips_in_a_row);
    s->step = step;
    s->samples =
        (uint64_t)(step - run->data_start) * (uint64_t)(o->total_batch_tokens / o->seq_len);
    return verdict.kind;
}

// ---- between steps ------------------------------------------------------------------------------

static bool save(Run* run, bool is_last) {
    Error error = no_error;
    CheckpointReport done;
    const CheckpointState* s = &run->state;
    if (checkpoint_save(&run->checkpoints, s, run->zero, &done, &error)) {
        log_checkpoint(run->log, s->step, done.name, done.bytes, done.ms);
        report_checkpoint(&run->report, s->step, done.name, done.bytes, done.ms);
        return true;
    }
    log_checkpoint_failed(run->log, s->step, error.text);
    if (!is_last)
        warn("step %ld: checkpoint failed, training goes on: %s", s->step, error.text);
    else if (run->comm->rank == 0)
        fprintf(stderr, "error: %s\n", error.text);
    return false;
}

static void validate(Run* run) {
    Error error = no_error;
    const Options* o = &run->options;
    uint64_t count = dataloader_val_count(&run->val, o->val_max_batches, o->total_batch_tokens);
    double loss;
    evaluate_validation(&run->step, &run->val, count, run->comm, &loss, &error);
    comm_agree(run->comm, &error);
    log_val(run->log, run->state.step, loss, count * (uint64_t)o->seq_len);
    report_val(&run->report, run->state.step, loss, count * (uint64_t)o->seq_len);
}

static void answer_hellaswag(Run* run) {
    Error error = no_error;
    int correct;
    evaluate_hellaswag(&run->step, &run->hellaswag, run->comm, &correct, &error);
    comm_agree(run->comm, &error);
    log_eval(run->log, run->state.step, "hellaswag", correct, run->hellaswag.num_examples);
    report_eval(&run->report, run->state.step, "hellaswag", correct, run->hellaswag.num_examples);
}

static void sample(Run* run) {
    const Options* o = &run->options;
    int total = o->sample_tokens < run->config.T ? o->sample_tokens + 1 : run->config.T;
    int* tokens = (int*)checked_malloc((size_t)total * sizeof(int));
    Sampling sampling = {o->temperature, o->top_k, o->seed, run->state.step};
    tokens[0] = tokenizer_start_token(&run->tokenizer);
    generate(&run->step, &sampling, tokens, 1, total, NULL, NULL);
    zero_drop_slots(run->zero);
    char* text = tokenizer_has_text(&run->tokenizer)
                     ? tokenizer_decode(&run->tokenizer, tokens + 1, total - 1)
                     : NULL;
    log_sample(run->log, run->state.step, text, tokens + 1, total - 1);
    report_sample(&run->report, run->state.step, &run->tokenizer, tokens + 1, total - 1);
    free(text);
    free(tokens);
}

static void report_health(Run* run) {
    char text[80];
    if (run->comm->rank == 0 && device_health(text, sizeof text))
        report_note(&run->report, "gpu  %ld/%ld | %s", run->state.step, run->max_steps, text);
}

// Is something that happens every `every` steps due after step s, the last one included?
static bool is_due(int every, long s, bool is_last) {
    return every > 0 && (s % every == 0 || is_last);
}

// ---- the run ------------------------------------------------------------------------------------

typedef struct {
    const char* reason; // of the end event
    int exit_code;
} Outcome;

static Outcome outcome(const char* reason, int exit_code) {
    Outcome o = {reason, exit_code};
    return o;
}

// Steps until the last one, --stop-at, a signal or non-finite numbers.
static Outcome train(Run* run) {
    const Options* o = &run->options;
    bool writes = o->output_dir && o->save_every >= 0, saved = true;
    Outcome end = outcome("finished", EXIT_FINISHED);
    Loop loop;
    loop_init(&loop, o);
    for (long step = run->state.step + 1; step <= run->max_steps; step++) {
        if (train_step(run, step, &loop) == VERDICT_STOP) {
            if (writes && step > 1 && !checkpoint_exists(&run->checkpoints, step - 1))
                save(run, true);
            end = outcome("nonfinite", EXIT_NONFINITE);
            break;
        }
        bool is_last = step == run->max_steps;
        bool stops = !is_last && (step == o->stop_at || run->signal != 0);
        if (is_due(o->log_gpu_every, step, false)) report_health(run);
        if (writes && (is_last || stops || is_due(o->save_every, step, false)))
            saved = save(run, is_last || stops);
        if (run->has_val && is_due(o->val_every, step, is_last)) validate(run);
        if (is_due(o->sample_every, step, is_last)) sample(run);
        if (run->has_hellaswag && is_due(o->val_every, step, is_last)) answer_hellaswag(run);
        if (stops) {
            end = outcome(run->signal ? "signal" : "stopped", EXIT_FINISHED);
            break;
        }
    }
    loop_free(&loop, o);
    if (!saved && end.exit_code == EXIT_FINISHED) end.exit_code = EXIT_FILE_IO;
    return end;
}

static void print_token(int token, void* context) {
    const Tokenizer* tokenizer = (const Tokenizer*)context;
    size_t length;
    if (!tokenizer) return; // not rank 0
    if (tokenizer_has_text(tokenizer)) {
        const unsigned char* text = tokenizer_token(tokenizer, token, &length);
        fwrite(text, 1, length, stdout);
    } else
        printf("%d ", token);
    fflush(stdout);
}

static void continue_prompt(Run* run) {
    const Options* o = &run->options;
    int num_prompt = run->num_prompt, total = num_prompt + o->sample_tokens;
    int* tokens = (int*)checked_malloc((size_t)total * sizeof(int));
    memcpy(tokens, run->prompt, (size_t)num_prompt * sizeof(int));
    void* printer = run->comm->rank == 0 ? &run->tokenizer : NULL;
    for (int i = 0; i < num_prompt; i++) print_token(tokens[i], printer);
    Sampling sampling = {o->temperature, o->top_k, o->seed, 0};
    generate(&run->step, &sampling, tokens, num_prompt, total, print_token, printer);
    if (printer && isatty(STDOUT_FILENO)) fputc('\n', stderr);
    free(tokens);
}

// An answer that did not reach stdout, because of a full disk say, is no success.
static int finish_answer(const Run* run) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return EXIT_FINISHED;
    if (run->comm->rank == 0) fprintf(stderr, "error: stdout: cannot be written\n");
    return EXIT_FILE_IO;
}

int main(int argc, char** argv) {
    static Run run; // zeroed
    if (!run_open(&run, argc, argv)) {
        const int exit_code = finish_answer(&run);
        watchdog_stop();
        run.comm->free(run.comm);
        return exit_code;
    }
    Options* o = &run.options;
    Outcome end = outcome("finished", EXIT_FINISHED);
    if (wants_prompt(o)) {
        continue_prompt(&run);
        end.exit_code = finish_answer(&run);
    } else {
        if (run.has_val && !run.is_resumed) validate(&run);
        if (run.max_steps == 0 && run.has_hellaswag) answer_hellaswag(&run);
        end = train(&run);

        EndInfo info = {run.state.step,
                        end.reason,
                        zero_params_hash(run.zero),
                        run.ledger.allocated_bytes,
                        now_seconds() - run.start_seconds,
                        run.comm};
        Error error = no_error;
        bool is_done = strcmp(end.reason, "finished") == 0 && run.max_steps > 0;
        if (is_done && end.exit_code == EXIT_FINISHED && o->output_dir && o->save_every >= 0)
            checkpoint_mark_done(o->output_dir, run.state.step, run.comm, &error);
        watchdog_activity("closing the log");
        log_end(run.log, &info);
        report_end(&run.report, &info);
        log_close(run.log, &error);
        comm_agree(run.comm, &error);
        if (end.exit_code == EXIT_FINISHED) end.exit_code = finish_answer(&run);
    }
    watchdog_stop();
    run_close(&run);
    return end.exit_code;
}
