// train/log.c - log.jsonl: events as JSON, appended whole.
#include "train/log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "train/json_number.h"

struct Log {
    char path[PATH_MAX];
    int fd;
    char* waiting; // lines that are not in the file yet, or only in part
    size_t waiting_bytes, waiting_capacity;
    int write_errno; // of the last attempt; 0: it went well
};

// ---- opening ------------------------------------------------------------------------------------

// Is the line an event of step `step` at the latest? Start events say start_step. Lines that are
// not JSON were torn by a crash.
static bool keeps_line(const char* line, size_t length, long step) {
    cJSON* event = cJSON_ParseWithLength(line, length);
    const cJSON* at = cJSON_GetObjectItemCaseSensitive(event, "step");
    if (!at) at = cJSON_GetObjectItemCaseSensitive(event, "start_step");
    bool keeps = cJSON_IsNumber(at) && at->valuedouble <= (double)step;
    cJSON_Delete(event);
    return keeps;
}

// Writes the lines of `old` that are kept to `copy`, then replaces old by it.
static bool rewrite(FILE* old, const char* old_path, const char* copy_path, long keep_to_step) {
    FILE* copy = fopen(copy_path, "w");
    if (!copy) return false;
    char* line = NULL;
    size_t capacity = 0;
    ssize_t length;
    bool ok = true;
    while (ok && (length = getline(&line, &capacity, old)) > 0)
        if (line[length - 1] == '\n' && keeps_line(line, (size_t)length - 1, keep_to_step))
            ok = fwrite(line, 1, (size_t)length, copy) == (size_t)length;
    free(line);
    ok = ok && !ferror(old) && fflush(copy) == 0 && fsync(fileno(copy)) == 0;
    ok = fclose(copy) == 0 && ok;
    ok = ok && rename(copy_path, old_path) == 0;
    int reason = errno;
    if (!ok) unlink(copy_path);
    errno = reason;
    return ok;
}

Log* log_open(const char* output_dir, long keep_to_step, Error* error) {
    Log* log = checked_calloc(1, sizeof *log);
    char copy_path[PATH_MAX + 8];
    snprintf(log->path, sizeof log->path, "%s/log.jsonl", output_dir);
    snprintf(copy_path, sizeof copy_path, "%s.tmp", log->path);
    bool ok = true;
    FILE* old = keep_to_step >= 0 ? fopen(log->path, "r") : NULL;
    if (old) {
        ok = rewrite(old, log->path, copy_path, keep_to_step);
        fclose(old);
    }
    int truncate = keep_to_step < 0 ? O_TRUNC : 0;
    log->fd = ok ? open(log->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | truncate, 0666) : -1;
    if (log->fd >= 0) return log;
    error_set(error, EXIT_FILE_IO, "%s: cannot be written: %s", log->path, strerror(errno));
    free(log);
    return NULL;
}

// ---- writing ------------------------------------------------------------------------------------

// As much of what is waiting as the disk takes. What was written goes, so that no line is torn for
// good and none stands twice.
static void flush_waiting(Log* log) {
    size_t done = 0;
    log->write_errno = 0;
    while (done < log->waiting_bytes) {
        ssize_t n = write(log->fd, log->waiting + done, log->waiting_bytes - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            log->write_errno = errno;
            break;
        }
        done += (size_t)n;
    }
    log->waiting_bytes -= done;
    if (log->waiting_bytes) memmove(log->waiting, log->waiting + done, log->waiting_bytes);
}

static void put_event(Log* log, cJSON* event) {
    char* text = cJSON_PrintUnformatted(event);
    CHECK(text, "out of memory");
    size_t length = strlen(text);
    if (log->waiting_bytes + length + 1 > log->waiting_capacity) {
        log->waiting_capacity = 2 * (log->waiting_bytes + length + 1);
        log->waiting = realloc(log->waiting, log->waiting_capacity);
        CHECK(log->waiting, "out of memory");
    }
    memcpy(log->waiting + log->waiting_bytes, text, length);
    log->waiting[log->waiting_bytes + length] = '\n';
    log->waiting_bytes += length + 1;
    cJSON_free(text);
    cJSON_Delete(event);
    bool was_well = log->write_errno == 0;
    flush_waiting(log);
    if (log->write_errno && was_well)
        warn("%s: cannot be written: %s; lines wait for the disk", log->path,
             strerror(log->write_errno));
}

bool log_close(Log* log, Error* error) {
    if (!log) return true;
    flush_waiting(log);
    bool ok = log->waiting_bytes == 0 && fsync(log->fd) == 0;
    if (!ok)
        error_set(error, EXIT_FILE_IO, "%s: cannot be written: %s", log->path,
                  strerror(log->write_errno ? log->write_errno : errno));
    close(log->fd);
    free(log->waiting);
    free(log);
    return ok;
}

// ---- events -------------------------------------------------------------------------------------

static cJSON* new_event(const char* name) {
    cJSON* event = cJSON_CreateObject();
    CHECK(event, "out of memory");
    cJSON_AddStringToObject(event, "event", name);
    return event;
}

void log_start(Log* log, const RunInfo* run) {
    if (!log) return;
    cJSON* event = new_event("start");
    cJSON_AddStringToObject(event, "version", run->version);
    cJSON_AddStringToObject(event, "precision", run->precision);
    cJSON_AddStringToObject(event, "backend", run->backend);
    json_add_int(event, "ranks", run->ranks);
    json_add_int(event, "threads", run->threads);
    json_add_int(event, "zero_stage", run->zero_stage);
    cJSON_AddStringToObject(event, "reduce", run->reduce);
    cJSON* model = cJSON_AddObjectToObject(event, "model");
    json_add_int(model, "L", run->model.L);
    json_add_int(model, "NH", run->model.NH);
    json_add_int(model, "C", run->model.C);
    json_add_int(model, "V", run->model.V);
    json_add_int(model, "T", run->model.T);
    json_add_size(event, "num_parameters", run->num_parameters);
    json_add_int(event, "batch", run->batch);
    json_add_int(event, "seq_len", run->seq_len);
    json_add_int(event, "grad_accum_steps", run->grad_accum_steps);
    json_add_int(event, "total_batch_tokens", run->total_batch_tokens);
    json_add_int(event, "max_steps", run->max_steps);
    json_add_int(event, "start_step", run->start_step);
    json_add_size(event, "seed", run->seed);
    cJSON* plan = cJSON_AddObjectToObject(event, "plan_bytes");
    for (int i = 0; i < run->ledger->num_lines; i++)
        json_add_size(plan, run->ledger->lines[i].name, run->ledger->lines[i].bytes);
    char text[32];
    time_t now = time(NULL);
    struct tm utc;
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    cJSON_AddStringToObject(event, "time", text);
    put_event(log, event);
}

void log_step(Log* log, const StepInfo* step) {
    if (!log) return;
    cJSON* event = new_event("step");
    json_add_int(event, "step", step->step);
    json_add_double(event, "loss", step->loss);
    json_add_double(event, "grad_norm", step->grad_norm);
    json_add_double(event, "lr", step->lr);
    if (step->loss_scale != 0) json_add_double(event, "loss_scale", step->loss_scale);
    if (step->skipped) cJSON_AddStringToObject(event, "skipped", step->skipped);
    json_add_double(event, "ms", step->ms);
    json_add_double(event, "forward_ms", step->forward_ms);
    json_add_double(event, "backward_ms", step->backward_ms);
    json_add_double(event, "update_ms", step->update_ms);
    json_add_double(event, "comm_wait_ms", step->comm_wait_ms);
    json_add_size(event, "tokens", step->tokens);
    json_add_double(event, "tokens_per_s", step->tokens_per_s);
    json_add_double(event, "mfu", step->mfu);
    json_add_size(event, "elements_sent", step->elements_sent);
    json_add_size(event, "bytes_sent", step->bytes_sent);
    put_event(log, event);
}

void log_val(Log* log, long step, double loss, uint64_t tokens) {
    if (!log) return;
    cJSON* event = new_event("val");
    json_add_int(event, "step", step);
    json_add_double(event, "loss", loss);
    json_add_size(event, "tokens", tokens);
    put_event(log, event);
}

void log_eval(Log* log, long step, const char* name, int correct, int total) {
    if (!log) return;
    cJSON* event = new_event("eval");
    json_add_int(event, "step", step);
    cJSON_AddStringToObject(event, "name", name);
    json_add_int(event, "correct", correct);
    json_add_int(event, "total", total);
    json_add_double(event, "accuracy", (double)correct / (double)total);
    put_event(log, event);
}

void log_sample(Log* log, long step, const char* text, const int* ids, int num_ids) {
    if (!log) return;
    cJSON* event = new_event("sample");
    json_add_int(event, "step", step);
    if (text)
        cJSON_AddStringToObject(event, "text", text);
    else
        cJSON_AddItemToObject(event, "ids", cJSON_CreateIntArray(ids, num_ids));
    put_event(log, event);
}

void log_checkpoint(Log* log, long step, const char* dir, uint64_t bytes, double ms) {
    if (!log) return;
    cJSON* event = new_event("checkpoint");
    json_add_int(event, "step", step);
    cJSON_AddStringToObject(event, "dir", dir);
    json_add_size(event, "bytes", bytes);
    json_add_double(event, "ms", ms);
    put_event(log, event);
}

void log_checkpoint_failed(Log* log, long step, const char* reason) {
    if (!log) return;
    cJSON* event = new_event("checkpoint_failed");
    json_add_int(event, "step", step);
    cJSON_AddStringToObject(event, "reason", reason);
    put_event(log, event);
}

void log_end(Log* log, const EndInfo* end) {
    if (!log) return;
    cJSON* event = new_event("end");
    json_add_int(event, "step", end->step);
    cJSON_AddStringToObject(event, "reason", end->reason);
    char hash[17];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)end->params_hash);
    cJSON_AddStringToObject(event, "params_hash", hash);
    json_add_size(event, "peak_bytes", end->peak_bytes);
    json_add_double(event, "seconds", end->seconds);
    put_event(log, event);
}
