// train/report.c - tables, step lines and the bar.
#include "train/report.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "train/schedule.h"

// ---- units --------------------------------------------------------------------------------------

const char* report_bytes(double bytes, char text[REPORT_BYTES_CHARS]) {
    static const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    int unit = 0;
    for (; fabs(bytes) >= 1024 && unit < 5; unit++) bytes /= 1024;
    snprintf(text, REPORT_BYTES_CHARS, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}

// "1.68M", "12.3k", "950": three digits.
static const char* short_count(double count, char text[16]) {
    static const char* const units[] = {"", "k", "M", "G", "T"};
    int unit = 0;
    for (; count >= 999.5 && unit < 4; unit++) count /= 1000;
    int decimals = unit == 0 || count >= 99.95 ? 0 : count >= 9.995 ? 1 : 2;
    snprintf(text, 16, "%.*f%s", decimals, count, units[unit]);
    return text;
}

// "4m31s", "2h05m", "9s"
static const char* duration(double seconds, char text[24]) {
    long s = lround(seconds);
    if (s < 60)
        snprintf(text, 24, "%lds", s);
    else if (s < 3600)
        snprintf(text, 24, "%ldm%02lds", s / 60, s % 60);
    else
        snprintf(text, 24, "%ldh%02ldm", s / 3600, s / 60 % 60);
    return text;
}

// ---- lines and the bar --------------------------------------------------------------------------

// The bar is the last line on the terminal; every other line replaces it. The cursor stays at its
// beginning, so that a warning of somebody else overwrites it instead of hanging on to it.
static void clear_bar(Report* report) {
    if (report->is_terminal) fputs("\r\033[K", report->out);
}

static void draw_bar(Report* report, long step) {
    enum { WIDTH = 40 };
    if (!report->is_terminal || report->max_steps <= 0) return;
    char bar[WIDTH + 1], text[24];
    int filled = (int)(WIDTH * step / report->max_steps);
    memset(bar, '.', WIDTH);
    memset(bar, '#', (size_t)filled);
    bar[WIDTH] = '\0';
    if (step < report->max_steps)
        fprintf(report->out, "[%s] %3ld%%  %s left\r", bar, 100 * step / report->max_steps,
                duration(report->mean_ms * (double)(report->max_steps - step) / 1000, text));
    fflush(report->out);
}

void report_note(Report* report, const char* fmt, ...) {
    if (!report->out) return;
    clear_bar(report);
    va_list args;
    va_start(args, fmt);
    vfprintf(report->out, fmt, args);
    va_end(args);
    fputc('\n', report->out);
    fflush(report->out);
}

void report_init(Report* report, FILE* out) {
    memset(report, 0, sizeof *report);
    report->out = out;
    // Open MPI gives ranks a terminal as stdout wherever the output goes; its stderr tells the
    // truth.
    report->is_terminal = out && isatty(fileno(out)) && isatty(STDERR_FILENO);
    report->first_loss = report->last_loss = report->last_val_loss = (double)NAN;
}

// ---- start --------------------------------------------------------------------------------------

static void row(Report* report, const char* name, const char* fmt, ...) PRINTF_LIKE(3, 4);
static void row(Report* report, const char* name, const char* fmt, ...) {
    fprintf(report->out, "  %-16s ", name);
    va_list args;
    va_start(args, fmt);
    vfprintf(report->out, fmt, args);
    va_end(args);
    fputc('\n', report->out);
}

static void memory_rows(Report* report, const Ledger* ledger) {
    static const char* const kinds[] = {"weights", "grads", "optimizer", "other"};
    char a[REPORT_BYTES_CHARS];
    row(report, "memory per rank", "%s", report_bytes((double)ledger_total_bytes(ledger), a));
    for (int kind = 0; kind < NUM_MEM_KINDS; kind++) {
        size_t bytes = ledger_kind_bytes(ledger, (MemKind)kind);
        if (kind != MEM_TRANSIENT && bytes)
            fprintf(report->out, "    %-20s %12s\n", kinds[kind], report_bytes((double)bytes, a));
    }
    for (int i = 0; i < ledger->num_lines; i++)
        if (ledger->lines[i].kind == MEM_TRANSIENT)
            fprintf(report->out, "    %-20s %12s\n", ledger->lines[i].name,
                    report_bytes((double)ledger->lines[i].bytes, a));
}

static void learning_rate_row(Report* report, const Options* o) {
    char scaled[96] = "";
    if (o->lr_batch_tokens)
        snprintf(scaled, sizeof scaled, " (%g for %ld tokens a step, scaled %s)", o->lr,
                 o->lr_batch_tokens, o->lr_scale);
    row(report, "learning rate", "%g%s, %s, warm-up %ld steps, final %g of it; weight decay %g",
        options_scaled_lr(o), scaled, schedule_name(o->schedule), o->warmup_steps, o->final_lr_frac,
        o->weight_decay);
}

// What a run that only continues a prompt does not have.
static void training_rows(Report* report, const RunInfo* run) {
    char a[REPORT_BYTES_CHARS], count[16], last[24] = "one epoch";
    const bool is_known = run->train_data || !run->options || run->options->max_steps >= 0;
    if (is_known) snprintf(last, sizeof last, "%ld", run->max_steps);
    row(report, "batch", "B %d x T %d x accum %d x ranks %d = %ld tokens a step", run->batch,
        run->seq_len, run->grad_accum_steps, run->ranks, run->total_batch_tokens);
    row(report, "steps", "%ld to %s, seed %llu", run->start_step, last,
        (unsigned long long)run->seed);
    if (run->options) learning_rate_row(report, run->options);
    row(report, "data", "%s; validation: %s", run->train_data ? run->train_data : "none",
        run->val_data ? run->val_data : "none");
    row(report, "output", "%s",
        run->output_dir ? run->output_dir : "none (-o DIR): nothing is written");
    row(report, "traffic", "%s elements, %s sent by a rank in a step",
        short_count((double)run->elements_per_step, count),
        report_bytes((double)run->bytes_per_step, a));
}

void report_start(Report* report, const RunInfo* run) {
    if (!report->out) return;
    report->max_steps = run->max_steps;
    report->memory_bytes = ledger_total_bytes(run->ledger);
    char count[16];
    const GPT2Config* m = &run->model;
    row(report, "program", "%s, %s, %s", run->version, run->backend, run->precision);
    row(report, "model", "%s: L %d, NH %d, C %d, V %d, T %d, %s parameters (%zu)", run->model_name,
        m->L, m->NH, m->C, m->V, m->T, short_count((double)run->num_parameters, count),
        run->num_parameters);
    row(report, "device", "%s", run->device);
    row(report, "ranks", "%d over %s, %d thread%s each", run->ranks, run->transport, run->threads,
        run->threads == 1 ? "" : "s");
    row(report, "ZeRO", "stage %d, reduce %s, accumulation in %s, recompute %d", run->zero_stage,
        run->reduce, run->accum_dtype, run->recompute);
    if (!run->options || !wants_prompt(run->options)) training_rows(report, run);
    if (run->fault && *run->fault) row(report, "fault", "%s, on purpose", run->fault);
    memory_rows(report, run->ledger);
    fflush(report->out);
}

// ---- steps --------------------------------------------------------------------------------------

// Without the sign that NaN may have, and that printf shows.
static double plain(double x) { return isnan(x) ? fabs(x) : x; }

void report_step(Report* report, const StepInfo* step) {
    if (!report->out) return;
    // The first step of a run also pays for warming up.
    double weight = report->steps_seen < 2 ? 1 : 0.1;
    report->mean_ms += weight * (step->ms - report->mean_ms);
    if (report->steps_seen++ == 0) report->first_loss = step->loss;
    report->last_loss = step->loss;

    char rate[16], bytes[REPORT_BYTES_CHARS], eta[24], peak[24] = "", skipped[24] = "";
    if (isfinite(step->mfu)) snprintf(peak, sizeof peak, " | %.1f%% peak", 100 * step->mfu);
    if (step->skipped) snprintf(skipped, sizeof skipped, " | skipped: %s", step->skipped);
    double left = report->mean_ms * (double)(report->max_steps - step->step) / 1000;
    clear_bar(report);
    fprintf(
        report->out,
        "step %ld/%ld | loss %.4f | norm %.2f | lr %.1e | %.*f ms | %s tok/s%s | %s | ETA %s%s\n",
        step->step, report->max_steps, plain(step->loss), plain(step->grad_norm), step->lr,
        step->ms < 10 ? 2 : 0, step->ms, short_count(step->tokens_per_s, rate), peak,
        report_bytes((double)report->memory_bytes, bytes), duration(left, eta), skipped);
    draw_bar(report, step->step);
    fflush(report->out);
}

void report_val(Report* report, long step, double loss, uint64_t tokens) {
    report->last_val_loss = loss;
    report_note(report, "val  %ld/%ld | loss %.4f | %llu tokens", step, report->max_steps,
                plain(loss), (unsigned long long)tokens);
}

void report_eval(Report* report, long step, const char* name, int correct, int total) {
    report_note(report, "eval %ld/%ld | %s %d of %d = %.4f", step, report->max_steps, name, correct,
                total, (double)correct / (double)total);
}

void report_sample(Report* report, long step, const Tokenizer* tokenizer, const int* ids,
                   int num_ids) {
    if (!report->out) return;
    char* text = tokenizer_decode(tokenizer, ids, num_ids);
    // An untrained model emits bytes that would command the terminal.
    for (char* c = text; *c; c++)
        if ((*c > 0 && *c < ' ' && *c != '\n' && *c != '\t') || *c == 127) *c = '?';
    report_note(report, "sample %ld/%ld:\n%s\n---", step, report->max_steps, text);
    free(text);
}

void report_checkpoint(Report* report, long step, const char* dir, uint64_t bytes, double ms) {
    char text[REPORT_BYTES_CHARS];
    report_note(report, "checkpoint %ld/%ld | %s | %s in %.0f ms", step, report->max_steps, dir,
                report_bytes((double)bytes, text), ms);
}

// ---- end ----------------------------------------------------------------------------------------

// What each kind of collective moved, and how fast, waiting included.
static void traffic_rows(Report* report, const Comm* comm) {
    char text[REPORT_BYTES_CHARS];
    for (int op = 0; op < NUM_COMM_OPS; op++) {
        const CommStats* stats = &comm->stats[op];
        if (stats->bytes == 0) continue;
        row(report, comm_op_name((CommOp)op), "%zu calls, %s sent in %.2f s: %.3g GB/s",
            stats->calls, report_bytes((double)stats->bytes, text), stats->seconds,
            stats->seconds > 0 ? (double)stats->bytes / stats->seconds / 1e9 : 0.0);
    }
}

void report_end(Report* report, const EndInfo* end) {
    if (!report->out) return;
    char text[REPORT_BYTES_CHARS], time[24];
    report_note(report, "%s at step %ld after %s", end->reason, end->step,
                duration(end->seconds, time));
    if (report->steps_seen)
        row(report, "loss", "%.4f at the first step, %.4f at the last", plain(report->first_loss),
            plain(report->last_loss));
    if (isfinite(report->last_val_loss))
        row(report, "validation loss", "%.4f", report->last_val_loss);
    row(report, "memory per rank", "%s allocated, as planned",
        report_bytes((double)end->peak_bytes, text));
    if (end->comm) traffic_rows(report, end->comm);
    row(report, "params_hash", "%016llx", (unsigned long long)end->params_hash);
    fflush(report->out);
}
