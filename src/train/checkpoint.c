// train/checkpoint.c - see checkpoint.h. Reading first, then writing, then what happens in OUT.
#include "train/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zlib.h>

#include "core/fault.h"
#include "train/files.h"
#include "train/json.h"
#include "train/model_file.h"
#include "train/safetensors.h"
#include "train/watchdog.h"

// ---- the names in OUT ---------------------------------------------------------------------------

static char* step_name(char out[32], long step) {
    snprintf(out, 32, "step_%08ld", step);
    return out;
}

// The step of "step_00000010", -1 for any other name.
static long step_of_name(const char* name) {
    if (strncmp(name, "step_", 5) != 0 || strlen(name) > 23) return -1;
    char* end;
    long step = strtol(name + 5, &end, 10);
    char again[32];
    return *end == '\0' && step >= 0 && strcmp(step_name(again, step), name) == 0 ? step : -1;
}

static bool is_temporary(const char* name) {
    size_t n = strlen(name);
    return strncmp(name, ".step_", 6) == 0 && n > 10 && strcmp(name + n - 4, ".tmp") == 0;
}

static int compare_newest_first(const void* a, const void* b) {
    long x = *(const long*)a, y = *(const long*)b;
    return x > y ? -1 : x < y;
}

// Steps of all OUT/step_*, newest first; to be freed. An OUT that cannot be read has none.
static long* list_steps(const char* out, int* count) {
    long* steps = NULL;
    size_t n = 0, capacity = 0;
    DIR* dir = opendir(out);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        long step = step_of_name(entry->d_name);
        if (step < 0) continue;
        if (n == capacity) {
            capacity = 2 * capacity + 16;
            steps = realloc(steps, capacity * sizeof(*steps));
            CHECK(steps, "out of host memory: %zu steps", capacity);
        }
        steps[n++] = step;
    }
    if (dir) closedir(dir);
    if (n > 1) qsort(steps, n, sizeof(*steps), compare_newest_first);
    *count = (int)n;
    return steps;
}

static int remove_entry(const char* path, const struct stat* info, int type, struct FTW* place) {
    (void)info, (void)type, (void)place;
    remove(path);
    return 0;
}

// Removes a file, or a directory with all it holds. Never follows a symbolic link.
static void remove_tree(const char* parent, const char* name) {
    char path[PATH_MAX];
    nftw(path_join(path, parent, name), remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

// Under kill -9 a half-removed checkpoint must not look like one: it gets its temporary name first.
static void remove_step(const char* out, long step) {
    char name[32], temporary[48], from[PATH_MAX], to[PATH_MAX];
    step_name(name, step);
    snprintf(temporary, sizeof(temporary), ".%s.old.tmp", name);
    remove_tree(out, temporary);
    if (rename(path_join(from, out, name), path_join(to, out, temporary)) == 0) {
        remove_tree(out, temporary);
    }
}

// ---- memory -------------------------------------------------------------------------------------

size_t checkpoint_buffer_elems(const ParamTable* table) {
    size_t largest = 0;
    for (int t = 0; t < table->num_tensors; t++)
        largest = max_size(largest, table->tensors[t].elems);
    return min_size(largest, ZERO_IO_ELEMS);
}

void checkpoint_plan(Ledger* ledger, const ParamTable* table, int rank) {
    if (rank != 0) return;
    ledger_add(ledger, MEM_TRANSIENT, "save_buffer",
               checkpoint_buffer_elems(table) * sizeof(float));
}

void checkpoint_init(Checkpoints* checkpoints, const Options* options, const ParamTable* table,
                     Comm* comm, Ledger* ledger) {
    memset(checkpoints, 0, sizeof(*checkpoints));
    checkpoints->out = options->output_dir;
    checkpoints->keep = options->keep_checkpoints;
    checkpoints->milestone_every = options->milestone_every;
    checkpoints->comm = comm;
    checkpoints->table = table;
    checkpoints->buffer_elems = checkpoint_buffer_elems(table);
    if (comm->rank == 0) checkpoints->buffer = device_alloc_pinned(ledger, "save_buffer");
}

void checkpoint_free(Checkpoints* checkpoints) { free(checkpoints->written); }

// ---- reading ------------------------------------------------------------------------------------

// Size first, then crc32 of the whole file.
static bool verify_file(const char* path, const CheckpointFile* expected, Error* error) {
    uint64_t bytes;
    int fd = open_regular(path, &bytes, error);
    if (fd < 0) return false;
    bool ok = true;
    if (bytes != expected->bytes) {
        ok = error_set(error, EXIT_USAGE, "%s: %llu bytes, expected %llu", path,
                       (unsigned long long)bytes, (unsigned long long)expected->bytes);
    }
    uLong crc = crc32(0, NULL, 0);
    if (ok) {
        enum { CHUNK = 1 << 20 };
        unsigned char* chunk = checked_malloc(CHUNK);
        for (ssize_t n; (n = read(fd, chunk, CHUNK)) != 0;) {
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) {
                ok = error_set(error, EXIT_USAGE, "%s: %s", path, strerror(errno));
                break;
            }
            crc = crc32(crc, chunk, (uInt)n);
            watchdog_tick();
        }
        free(chunk);
    }
    if (ok && crc != expected->crc32) {
        ok = error_set(error, EXIT_USAGE, "%s: crc32 %08lx, expected %08x", path, crc,
                       expected->crc32);
    }
    close(fd);
    return ok;
}

// The model that config.json describes is the one that was trained.
static bool verify_config(const char* dir, const GPT2Config* expected, Error* error) {
    char path[PATH_MAX];
    GPT2Config config;
    if (!model_file_config(&config, path_join(path, dir, checkpoint_file_name(CHECKPOINT_CONFIG)),
                           error)) {
        return false;
    }
    if (memcmp(&config, expected, sizeof(config)) == 0) return true;
    return error_set(error, EXIT_USAGE, "%s: is of another model than state.json", path);
}

// Reads and verifies one step directory; its state.json is left in *text for the other ranks.
static bool verify_checkpoint(const char* dir, long step, char** text, size_t* length,
                              Error* error) {
    char path[PATH_MAX];
    CheckpointState state;
    CheckpointFile files[NUM_CHECKPOINT_FILES];
    *text = json_read_file(path_join(path, dir, "state.json"), STATE_JSON_MAX, length, error);
    if (!*text) return false;
    if (!state_from_json(&state, files, *text, *length, path, error)) return false;
    bool ok = state.step == step;
    if (!ok) error_set(error, EXIT_USAGE, "%s: step is %ld, expected %ld", path, state.step, step);
    ok = ok && verify_config(dir, &state.model, error);
    for (int i = 0; i < NUM_CHECKPOINT_FILES && ok; i++) {
        ok = verify_file(path_join(path, dir, checkpoint_file_name(i)), &files[i], error);
    }
    state_free(&state);
    return ok;
}

// Rank 0's part: the newest valid directory and the text of its state.json, or NULL.
static char* find_newest(const char* out, char dir[PATH_MAX], size_t* length) {
    int count;
    long* steps = list_steps(out, &count);
    char* text = NULL;
    for (int i = 0; i < count && !text; i++) {
        char name[32];
        Error problem = {0};
        path_join(dir, out, step_name(name, steps[i]));
        if (verify_checkpoint(dir, steps[i], &text, length, &problem)) break;
        free(text);
        text = NULL;
        *length = 0;
        warn("checkpoint %s is passed over: %s", name, problem.text);
    }
    free(steps);
    return text;
}

bool checkpoint_find(const char* out, CheckpointState* state, char dir[PATH_MAX], bool* found,
                     Comm* comm, Error* error) {
    size_t length = 0;
    watchdog_activity("verifying checkpoints");
    char* text = comm->rank == 0 ? find_newest(out, dir, &length) : NULL;
    comm->host_broadcast(comm, &length, sizeof(length), 0);
    watchdog_activity("");
    *found = length > 0;
    if (!*found) return true;
    if (!text) text = checked_malloc(length);
    comm->host_broadcast(comm, text, length, 0);
    comm->host_broadcast(comm, dir, PATH_MAX, 0);
    CheckpointFile files[NUM_CHECKPOINT_FILES];
    bool ok = state_from_json(state, files, text, length, dir, error);
    free(text);
    return ok;
}

// The moments of one tensor, piece by piece. A rank 0 that cannot read goes on with what is in the
// buffer, since the others wait for it; the load fails as a whole.
static void load_moment(const Checkpoints* checkpoints, const SafeTensors* file, Zero* zero,
                        StateKind kind, int t, Error* error) {
    const TensorSpec* spec = &checkpoints->table->tensors[t];
    const SafeTensor* tensor = NULL;
    if (checkpoints->comm->rank == 0 && error->code == 0) {
        char name[64];
        snprintf(name, sizeof(name), "%s.%s", kind == STATE_M ? "m" : "v", spec->name);
        tensor = safetensors_find(file, name);
        if (!tensor || tensor->elems != spec->elems) {
            error_set(error, EXIT_USAGE, "%s: tensor %s is %s", file->path, name,
                      tensor ? "of another size" : "missing");
        }
    }
    for (size_t first = 0; first < spec->elems; first += checkpoints->buffer_elems) {
        size_t count = min_size(checkpoints->buffer_elems, spec->elems - first);
        if (tensor && error->code == 0) {
            safetensors_read(file, tensor, first, count, checkpoints->buffer, error);
        }
        zero_write(zero, kind, t, first, count, checkpoints->buffer);
        watchdog_tick();
    }
}

static bool load_all(const Checkpoints* checkpoints, const char* dir, Zero* zero, Error* error) {
    Comm* comm = checkpoints->comm;
    ModelFile model;
    if (!model_file_open(&model, dir, comm, error)) return false;
    bool ok = model_file_load(&model, zero, checkpoints->table, checkpoints->buffer,
                              checkpoints->buffer_elems, comm, error);
    model_file_close(&model);
    if (!ok) return false;
    SafeTensors file = {.fd = -1};
    if (comm->rank == 0) {
        char path[PATH_MAX];
        path_join(path, dir, checkpoint_file_name(CHECKPOINT_OPTIMIZER));
        safetensors_open(&file, path, error);
    }
    if (!comm_all_ok(comm, error)) return false;
    for (int t = 0; t < checkpoints->table->num_tensors; t++) {
        load_moment(checkpoints, &file, zero, STATE_M, t, error);
        load_moment(checkpoints, &file, zero, STATE_V, t, error);
    }
    if (comm->rank == 0) safetensors_close(&file);
    return comm_all_ok(comm, error);
}

bool checkpoint_load(Checkpoints* checkpoints, const char* dir, Zero* zero,
                     CheckpointReport* report, Error* error) {
    double start = now_seconds();
    watchdog_activity("loading a checkpoint");
    bool ok = load_all(checkpoints, dir, zero, error);
    watchdog_activity("");
    const char* name = strrchr(dir, '/');
    snprintf(report->name, sizeof(report->name), "%.31s", name ? name + 1 : dir);
    checkpoints->loaded = step_of_name(report->name);
    report->bytes = 3 * checkpoints->table->num_params * sizeof(float);
    report->ms = 1e3 * (now_seconds() - start);
    return ok;
}

// ---- writing ------------------------------------------------------------------------------------

// A save in progress. Ranks other than 0 have no files; they take part in zero_read.
typedef struct {
    Checkpoints* checkpoints;
    Zero* zero;
    long step;
    long points; // moments passed at which ZERO_FAULT=killsave may strike
    char temporary[PATH_MAX];
    int fd; // the file being written
    CheckpointFile current;
    CheckpointFile files[NUM_CHECKPOINT_FILES];
    Error* error; // of rank 0
} Save;

static bool is_writing(const Save* save) {
    return save->checkpoints->comm->rank == 0 && save->error->code == 0;
}

static void kill_point(Save* save) {
    if (fault_now(FAULT_KILLSAVE, save->step, save->points++)) raise(SIGKILL);
}

static void fail_save(Save* save, const char* what) {
    error_set(save->error, EXIT_FILE_IO, "%s: cannot %s: %s", save->temporary, what,
              strerror(errno));
}

static void file_begin(Save* save, const char* name) {
    save->fd = -1;
    save->current = (CheckpointFile){0, (uint32_t)crc32(0, NULL, 0)};
    if (!is_writing(save)) return;
    char path[PATH_MAX];
    path_join(path, save->temporary, name);
    save->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (save->fd < 0) fail_save(save, "create a file");
}

static void file_write(Save* save, const void* bytes, size_t count) {
    const unsigned char* at = bytes;
    if (!is_writing(save)) return;
    save->current.crc32 = (uint32_t)crc32_z(save->current.crc32, at, count);
    save->current.bytes += count;
    while (count > 0) {
        ssize_t n = write(save->fd, at, count);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            fail_save(save, "write");
            return;
        }
        at += n;
        count -= (size_t)n;
    }
}

static void file_end(Save* save) {
    if (is_writing(save) && fsync(save->fd) != 0) fail_save(save, "fsync");
    if (save->fd >= 0 && close(save->fd) != 0 && is_writing(save)) fail_save(save, "close");
    save->fd = -1;
}

static void write_text_file(Save* save, const char* name, char* text) {
    file_begin(save, name);
    file_write(save, text, strlen(text));
    file_end(save);
    free(text);
}

// One tensor's elements from all ranks into the file, piece by piece.
static void write_tensor(Save* save, StateKind kind, int t) {
    const Checkpoints* checkpoints = save->checkpoints;
    size_t elems = checkpoints->table->tensors[t].elems;
    for (size_t first = 0; first < elems; first += checkpoints->buffer_elems) {
        size_t count = min_size(checkpoints->buffer_elems, elems - first);
        zero_read(save->zero, kind, t, first, count, checkpoints->buffer);
        file_write(save, checkpoints->buffer, count * sizeof(float));
        watchdog_tick();
        kill_point(save);
    }
}

// A safetensors file with, for each tensor of the table, one tensor per kind.
static void write_tensors(Save* save, int file, const StateKind* kinds, const char* const* prefixes,
                          int num_kinds) {
    const ParamTable* table = save->checkpoints->table;
    SafeTensorsHeader header;
    safetensors_header_begin(&header);
    for (int t = 0; t < table->num_tensors; t++) {
        const TensorSpec* spec = &table->tensors[t];
        for (int k = 0; k < num_kinds; k++) {
            safetensors_header_add(&header, prefixes[k], spec->name, spec->num_dims, spec->shape);
        }
    }
    safetensors_header_end(&header);
    file_begin(save, checkpoint_file_name(file));
    file_write(save, header.text, header.length);
    free(header.text);
    for (int t = 0; t < table->num_tensors; t++) {
        for (int k = 0; k < num_kinds; k++) write_tensor(save, kinds[k], t);
    }
    file_end(save);
    save->files[file] = save->current;
}

static bool sync_directory(const char* path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool ok = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL); // some file systems cannot
    if (fd >= 0) close(fd);
    return ok;
}

// Room for weights and two moments, with 1 MiB for headers and JSON.
static void check_free_space(Save* save) {
    struct statvfs fs;
    const char* out = save->checkpoints->out;
    size_t need = 3 * save->checkpoints->table->num_params * sizeof(float) + (1 << 20);
    if (statvfs(out, &fs) != 0) return; // what is not known is no reason to fail
    size_t have = (size_t)fs.f_bavail * fs.f_frsize;
    if (have < need) {
        error_set(save->error, EXIT_FILE_IO, "%s: %.1f MiB free, a checkpoint needs %.1f MiB", out,
                  (double)have / 0x1p20, (double)need / 0x1p20);
    }
}

static void begin_directory(Save* save) {
    const char* out = save->checkpoints->out;
    char name[48];
    snprintf(name, sizeof(name), ".step_%08ld.tmp", save->step);
    path_join(save->temporary, out, name);
    remove_tree(out, name);
    check_free_space(save);
    if (is_writing(save) && mkdir(save->temporary, 0777) != 0) fail_save(save, "create it");
}

// Gives the complete directory its name and points `latest` at it.
static void publish_directory(Save* save) {
    const char* out = save->checkpoints->out;
    char name[32], final[PATH_MAX], link_temporary[PATH_MAX], latest[PATH_MAX];
    path_join(final, out, step_name(name, save->step));
    if (!sync_directory(save->temporary)) fail_save(save, "fsync");
    kill_point(save);
    if (!is_writing(save)) return;
    remove_step(out, save->step); // one that was passed over, or of a run before --overwrite
    if (rename(save->temporary, final) != 0 || !sync_directory(out)) {
        fail_save(save, "rename");
        return;
    }
    kill_point(save);
    path_join(latest, out, "latest");
    path_join(link_temporary, out, ".step_latest.tmp");
    unlink(link_temporary);
    bool is_linked = symlink(name, link_temporary) == 0 && rename(link_temporary, latest) == 0 &&
                     sync_directory(out);
    if (!is_linked && !save->checkpoints->lacks_latest) // the checkpoint is complete without
        warn("%s: cannot replace it: %s", latest, strerror(errno));
    if (!is_linked) unlink(link_temporary);
    save->checkpoints->lacks_latest = !is_linked;
    kill_point(save);
}

// Rank 0: this run has written or loaded that checkpoint, or it is older than the loaded one. All
// others were passed over.
static bool is_trusted(const Checkpoints* checkpoints, long step) {
    bool is_written = false;
    for (int i = 0; i < checkpoints->num_written; i++)
        is_written |= checkpoints->written[i] == step;
    return is_written || step <= checkpoints->loaded;
}

static void note_written(Checkpoints* checkpoints, long step) {
    size_t count = (size_t)++checkpoints->num_written;
    checkpoints->written = realloc(checkpoints->written, count * sizeof(long));
    CHECK(checkpoints->written, "out of host memory: %zu steps", count);
    checkpoints->written[count - 1] = step;
}

// Among the checkpoints up to this one, the newest `keep` stay, and milestones always; damaged ones
// do not count.
static void delete_old(const Checkpoints* checkpoints, long step) {
    if (checkpoints->keep == 0) return;
    int count, kept = 0;
    long* steps = list_steps(checkpoints->out, &count);
    for (int i = 0; i < count; i++) {
        if (steps[i] > step) continue;
        if (kept < checkpoints->keep) {
            kept += is_trusted(checkpoints, steps[i]);
            continue;
        }
        long every = checkpoints->milestone_every;
        if (every == 0 || steps[i] % every != 0) remove_step(checkpoints->out, steps[i]);
    }
    free(steps);
}

bool checkpoint_save(Checkpoints* checkpoints, const CheckpointState* state, Zero* zero,
                     CheckpointReport* report, Error* error) {
    double start = now_seconds();
    bool is_root = checkpoints->comm->rank == 0;
    watchdog_activity("saving a checkpoint");
    Save save = {
        .checkpoints = checkpoints, .zero = zero, .step = state->step, .fd = -1, .error = error};
    static const StateKind master[] = {STATE_MASTER}, moments[] = {STATE_M, STATE_V};
    static const char *const no_prefix[] = {""}, *const moment_prefixes[] = {"m.", "v."};
    *report = (CheckpointReport){0};
    if (is_root) begin_directory(&save);
    write_text_file(&save, checkpoint_file_name(CHECKPOINT_CONFIG), config_to_json(&state->model));
    save.files[CHECKPOINT_CONFIG] = save.current;
    write_text_file(&save, checkpoint_file_name(CHECKPOINT_GENERATION),
                    generation_config_to_json(&state->model));
    save.files[CHECKPOINT_GENERATION] = save.current;
    write_tensors(&save, CHECKPOINT_MODEL, master, no_prefix, 1);
    write_tensors(&save, CHECKPOINT_OPTIMIZER, moments, moment_prefixes, 2);
    if (is_root) {
        write_text_file(&save, "state.json", state_to_json(state, save.files));
        report->bytes = save.current.bytes;
        for (int i = 0; i < NUM_CHECKPOINT_FILES; i++) report->bytes += save.files[i].bytes;
        publish_directory(&save);
        if (is_writing(&save)) {
            note_written(checkpoints, state->step);
            delete_old(checkpoints, state->step);
        }
        const char* temporary = strrchr(save.temporary, '/') + 1;
        if (!is_writing(&save)) remove_tree(checkpoints->out, temporary);
    }
    bool ok = comm_all_ok(checkpoints->comm, error);
    watchdog_activity("");
    step_name(report->name, state->step);
    report->ms = 1e3 * (now_seconds() - start);
    return ok;
}

// ---- OUT ----------------------------------------------------------------------------------------

static bool make_directories(const char* path, Error* error) {
    char partial[PATH_MAX];
    snprintf(partial, sizeof(partial), "%s", path);
    for (char* slash = partial + 1; *slash; slash++) {
        if (*slash != '/') continue;
        *slash = '\0';
        mkdir(partial, 0777); // whether it worked shows at the last one
        *slash = '/';
    }
    if (mkdir(path, 0777) == 0 || errno == EEXIST) return true;
    return error_set(error, EXIT_USAGE, "-o %s: cannot create it: %s", path, strerror(errno));
}

static bool try_writing(const char* out, Error* error) {
    char path[PATH_MAX];
    path_join(path, out, ".step_write.tmp");
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return error_set(error, EXIT_USAGE, "-o %s: cannot write there: %s", out, strerror(errno));
    close(fd);
    unlink(path);
    return true;
}

// The same for a rehearsal, which writes nothing: what exists of the path must be open to it.
static bool could_write(const char* out, Error* error) {
    char path[PATH_MAX], *place = path;
    struct stat info;
    snprintf(path, sizeof(path), "%s", out);
    while (access(place, F_OK) != 0 && errno == ENOENT) place = dirname(place);
    bool ok = stat(place, &info) == 0 && access(place, W_OK | X_OK) == 0;
    if (ok && S_ISDIR(info.st_mode)) return true;
    return error_set(error, EXIT_USAGE, "-o %s: cannot write to %s: %s", out, place,
                     strerror(ok ? ENOTDIR : errno));
}

// Holds OUT for this run, until the process ends. A rank 0 that was killed may take a moment to go.
static bool lock_out(const char* out, Error* error) {
    static int lock = -1; // one OUT at a time
    if (lock >= 0) close(lock);
    lock = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int tries = 0; lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) != 0; tries++) {
        if (errno != EWOULDBLOCK) break; // a file system without locks
        if (tries == 20)
            return error_set(error, EXIT_USAGE, "-o %s: another run is writing there", out);
        usleep(100 * 1000);
    }
    return true;
}

static bool is_of_earlier_run(const char* name) {
    return strcmp(name, "latest") == 0 || strncmp(name, "DONE_", 5) == 0;
}

// Removes the entries of OUT that `is_chosen` names.
static void remove_chosen(const char* out, bool (*is_chosen)(const char* name)) {
    DIR* dir = opendir(out);
    for (struct dirent* entry; dir && (entry = readdir(dir));) {
        if (is_chosen(entry->d_name)) remove_tree(out, entry->d_name);
    }
    if (dir) closedir(dir);
}

static bool open_out(const Options* options, Error* error) {
    const char* out = options->output_dir;
    int count;
    bool ok = options->dry_run
                  ? could_write(out, error)
                  : make_directories(out, error) && try_writing(out, error) && lock_out(out, error);
    if (!ok) return false;
    free(list_steps(out, &count));
    if (!options->resume && !options->overwrite && count > 0) {
        return error_set(error, EXIT_USAGE,
                         "-o %s: holds %d checkpoint%s of an earlier run; -y 1 resumes it, "
                         "--overwrite removes them",
                         out, count, count == 1 ? "" : "s");
    }
    if (!options->dry_run) remove_chosen(out, is_temporary);
    return true;
}

bool checkpoint_open_out(const Options* options, Comm* comm, Error* error) {
    watchdog_activity("opening the output folder");
    if (comm->rank == 0) open_out(options, error);
    bool ok = comm_all_ok(comm, error);
    watchdog_activity("");
    return ok;
}

void checkpoint_start_anew(const Checkpoints* checkpoints, bool overwrite) {
    watchdog_activity("removing an earlier run's files");
    if (checkpoints->comm->rank == 0) {
        int count;
        long* steps = list_steps(checkpoints->out, &count);
        for (int i = 0; i < count && overwrite; i++) remove_step(checkpoints->out, steps[i]);
        free(steps);
        remove_chosen(checkpoints->out, is_of_earlier_run);
    }
    checkpoints->comm->barrier(checkpoints->comm);
    watchdog_activity("");
}

bool checkpoint_exists(const Checkpoints* checkpoints, long step) {
    char name[32], path[PATH_MAX];
    struct stat info;
    int exists = 0;
    path_join(path, checkpoints->out, step_name(name, step));
    if (checkpoints->comm->rank == 0)
        exists = is_trusted(checkpoints, step) && stat(path, &info) == 0;
    checkpoints->comm->host_broadcast(checkpoints->comm, &exists, sizeof(exists), 0);
    return exists;
}

bool checkpoint_mark_done(const char* out, long step, Comm* comm, Error* error) {
    watchdog_activity("marking the run as done");
    if (comm->rank == 0) {
        char name[32], path[PATH_MAX];
        snprintf(name, sizeof(name), "DONE_%08ld", step);
        path_join(path, out, name);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd < 0 || fsync(fd) != 0) {
            error_set(error, EXIT_FILE_IO, "%s: cannot write it: %s", path, strerror(errno));
        }
        if (fd >= 0) close(fd);
    }
    bool ok = comm_all_ok(comm, error);
    watchdog_activity("");
    return ok;
}
