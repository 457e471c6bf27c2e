// train/dataloader.c - token shards: finding and checking them, and the order of samples.
//
// Formats, as llm.c writes them: 256 int32 (magic, version, number of tokens, zeros), then the
// tokens. Epoch e visits the shards in the order rng_permute(seed, RNG_SHARDS + e) and, inside a
// shard, the samples in the order of a permutation that is keyed by the shard too.
#include "train/dataloader.h"

#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include "core/rng.h"
#include "train/files.h"
#include "train/options.h"
#include "train/watchdog.h"

enum { HEADER_BYTES = 1024 };
enum { CHUNK_BYTES = 1 << 20 };
#define START_CHECK_BYTES ((uint64_t)256 << 20) // more is checked as it is used
#define NO_EPOCH          UINT64_MAX

// ---- files --------------------------------------------------------------------------------------

// Reads `bytes` at `offset` of the open file `fd` of a shard.
static bool read_shard(const Shard* shard, int fd, void* out, size_t bytes, uint64_t offset,
                       Error* error) {
    if (read_at(fd, out, bytes, offset)) return true;
    return error_set(error, EXIT_FILE_IO, "%s: cannot be read at byte %llu: %s", shard->path,
                     (unsigned long long)offset, errno ? strerror(errno) : "it has shrunk");
}

// Makes shard s the one open file: one descriptor is enough, since samples come shard by shard, and
// a data set may have more shards than a process may have files.
static bool use_shard(DataLoader* loader, int s, Error* error) {
    if (loader->open_shard == s) return true;
    if (loader->fd >= 0) close(loader->fd);
    loader->open_shard = -1;
    uint64_t bytes;
    loader->fd = open_regular(loader->shards[s].path, &bytes, error);
    if (loader->fd < 0) {
        error->code = EXIT_FILE_IO; // it was there at start
        return false;
    }
    loader->open_shard = s;
    return true;
}

static uint32_t token_at(const unsigned char* raw, int token_bytes, size_t i) {
    if (token_bytes == 1) return raw[i];
    if (token_bytes == 2) return raw[2 * i] | (uint32_t)raw[2 * i + 1] << 8;
    const unsigned char* p = raw + 4 * i;
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static bool bad_token(const Shard* shard, uint64_t index, uint32_t value, int V, Error* error) {
    return error_set(
        error, EXIT_USAGE,
        "%s: token %llu is %u, expected below the vocabulary's %d (byte %llu of the file)",
        shard->path, (unsigned long long)index, value, V,
        (unsigned long long)(index * (uint64_t)shard->token_bytes) +
            (unsigned long long)shard->header_bytes);
}

static bool ends_with(const char* text, const char* end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

// ---- opening ------------------------------------------------------------------------------------

// Type and number of tokens from the header; the file must hold exactly as many.
static bool read_header(Shard* shard, int fd, Error* error) {
    int32_t header[HEADER_BYTES / 4];
    const char* path = shard->path;
    if (shard->file_bytes < HEADER_BYTES)
        return error_set(error, EXIT_USAGE, "%s: size %llu bytes, expected a header of %d at least",
                         path, (unsigned long long)shard->file_bytes, HEADER_BYTES);
    if (!read_shard(shard, fd, header, sizeof header, 0, error)) return false;
    if (header[0] == 20240520)
        shard->token_bytes = 2;
    else if (header[0] == 20240801)
        shard->token_bytes = 4;
    else
        return error_set(error, EXIT_USAGE,
                         "%s: magic %d, expected 20240520 (uint16 tokens) or 20240801 (uint32); "
                         "a text file must be called .txt",
                         path, header[0]);
    int version = shard->token_bytes == 2 ? 1 : 7;
    if (header[1] != version)
        return error_set(error, EXIT_USAGE, "%s: version %d, expected %d", path, header[1],
                         version);
    if (header[2] < 0)
        return error_set(error, EXIT_USAGE, "%s: number of tokens %d, expected 0 or more", path,
                         header[2]);
    shard->header_bytes = HEADER_BYTES;
    shard->num_tokens = (uint64_t)header[2];
    uint64_t expected = HEADER_BYTES + shard->num_tokens * (uint64_t)shard->token_bytes;
    if (shard->file_bytes != expected)
        return error_set(error, EXIT_USAGE,
                         "%s: size %llu bytes, expected %llu for the %llu tokens of its header",
                         path, (unsigned long long)shard->file_bytes, (unsigned long long)expected,
                         (unsigned long long)shard->num_tokens);
    return true;
}

static bool inspect_shard(Shard* shard, int T, Error* error) {
    const char* slash = strrchr(shard->path, '/');
    shard->name = slash ? slash + 1 : shard->path;
    int fd = open_regular(shard->path, &shard->file_bytes, error);
    if (fd < 0) return false;
    bool ok = true;
    if (ends_with(shard->path, ".txt")) {
        shard->token_bytes = 1;
        shard->num_tokens = shard->file_bytes;
    } else {
        ok = read_header(shard, fd, error);
    }
    close(fd);
    shard->num_samples = shard->num_tokens ? (shard->num_tokens - 1) / (uint64_t)T : 0;
    return ok;
}

static int compare_paths(const void* a, const void* b) {
    return strcmp(((const Shard*)a)->path, ((const Shard*)b)->path);
}

bool dataloader_exists(const char* pattern) {
    if (access(pattern, F_OK) == 0) return true;
    glob_t files = {0};
    bool found = glob(pattern, GLOB_NOSORT, NULL, &files) == 0;
    globfree(&files);
    return found;
}

int dataloader_default_vocab(const char* pattern) {
    return ends_with(pattern, ".txt") ? 257 : 50257;
}

// Lists the files of the pattern, sorted by path.
static bool find_shards(DataLoader* loader, Error* error) {
    const DataConfig* c = &loader->config;
    glob_t files = {0};
    bool is_path = access(c->pattern, F_OK) == 0; // as it is, brackets and all; else a glob
    if (!is_path && glob(c->pattern, GLOB_NOSORT, NULL, &files) != 0) files.gl_pathc = 0;
    loader->num_shards = is_path ? 1 : (int)files.gl_pathc;
    loader->shards = checked_calloc((size_t)loader->num_shards + 1, sizeof(Shard));
    for (int s = 0; s < loader->num_shards; s++) {
        loader->shards[s].path = strdup(is_path ? c->pattern : files.gl_pathv[s]);
        CHECK(loader->shards[s].path, "out of memory");
    }
    globfree(&files);
    qsort(loader->shards, (size_t)loader->num_shards, sizeof(Shard), compare_paths);
    if (loader->num_shards > 0) return true;
    bool is_default =
        strcmp(c->pattern, DEFAULT_TRAIN_DATA) == 0 || strcmp(c->pattern, DEFAULT_VAL_DATA) == 0;
    return error_set(error, EXIT_USAGE, "%s %s: no such file%s", c->option, c->pattern,
                     is_default ? "; python3 data/tinyshakespeare.py makes it; or -i FILE" : "");
}

// Leaves out shards that hold no sample, and counts the rest.
static bool count_samples(DataLoader* loader, Error* error) {
    const DataConfig* c = &loader->config;
    uint64_t have_tokens = 0;
    int kept = 0;
    for (int s = 0; s < loader->num_shards; s++) {
        Shard shard = loader->shards[s];
        have_tokens += shard.num_tokens;
        loader->num_samples += shard.num_samples;
        if (shard.num_samples > 0) {
            loader->shards[kept++] = shard;
            continue;
        }
        if (loader->num_shards > 1)
            warn("%s: %llu tokens, left out, a sample takes %d", shard.path,
                 (unsigned long long)shard.num_tokens, c->T + 1);
        free(shard.path);
    }
    loader->num_shards = kept;
    if (loader->num_samples >= c->samples_per_step) return true;
    uint64_t need = c->samples_per_step * (uint64_t)c->T + 1;
    return error_set(
        error, EXIT_USAGE,
        "%s %s: too little data, %llu tokens (%llu sample%s of %d + 1), need %llu tokens "
        "(%llu sample%s) for one %s",
        c->option, c->pattern, (unsigned long long)have_tokens,
        (unsigned long long)loader->num_samples, loader->num_samples == 1 ? "" : "s", c->T,
        (unsigned long long)need, (unsigned long long)c->samples_per_step,
        c->samples_per_step == 1 ? "" : "s", c->samples_per_step > 1 ? "step" : "sequence");
}

static bool may_exceed(const Shard* shard, int V) {
    return shard->token_bytes == 4 || V < (shard->token_bytes == 1 ? 256 : 65536);
}

bool dataloader_check(DataLoader* loader, Error* error) {
    int V = loader->config.V;
    unsigned char* chunk = checked_malloc(CHUNK_BYTES);
    bool ok = true;
    for (int s = 0; ok && s < loader->num_shards; s++) {
        const Shard* shard = &loader->shards[s];
        if (!may_exceed(shard, V)) continue;
        ok = use_shard(loader, s, error);
        uint64_t per_chunk = CHUNK_BYTES / (uint64_t)shard->token_bytes;
        for (uint64_t first = 0; ok && first < shard->num_tokens; first += per_chunk) {
            uint64_t left = shard->num_tokens - first;
            size_t count = (size_t)(left < per_chunk ? left : per_chunk);
            ok = read_shard(shard, loader->fd, chunk, count * (size_t)shard->token_bytes,
                            (uint64_t)shard->header_bytes + first * (uint64_t)shard->token_bytes,
                            error);
            for (size_t i = 0; ok && i < count; i++) {
                uint32_t token = token_at(chunk, shard->token_bytes, i);
                if (token >= (uint32_t)V) ok = bad_token(shard, first + i, token, V, error);
            }
            watchdog_tick();
        }
    }
    free(chunk);
    return ok;
}

bool dataloader_open(DataLoader* loader, const DataConfig* config, Error* error) {
    memset(loader, 0, sizeof *loader);
    loader->config = *config;
    loader->open_shard = loader->fd = -1;
    loader->ordered_epoch = NO_EPOCH;
    bool ok = find_shards(loader, error);
    uint64_t bytes = 0;
    for (int s = 0; ok && s < loader->num_shards; s++) {
        ok = inspect_shard(&loader->shards[s], config->T, error);
        bytes += loader->shards[s].file_bytes;
    }
    ok = ok && count_samples(loader, error);
    if (ok && bytes <= START_CHECK_BYTES) ok = dataloader_check(loader, error);
    if (!ok) {
        dataloader_close(loader);
        return false;
    }
    loader->order = checked_calloc((size_t)loader->num_shards, sizeof(int));
    loader->first_sample = checked_calloc((size_t)loader->num_shards + 1, sizeof(uint64_t));
    loader->raw = checked_malloc(((size_t)config->T + 1) * 4);
    return true;
}

void dataloader_close(DataLoader* loader) {
    if (loader->fd >= 0) close(loader->fd);
    for (int s = 0; s < loader->num_shards; s++) free(loader->shards[s].path);
    free(loader->shards);
    free(loader->order);
    free(loader->first_sample);
    free(loader->raw);
    memset(loader, 0, sizeof *loader);
    loader->fd = loader->open_shard = -1;
}

// ---- order --------------------------------------------------------------------------------------

long dataloader_epoch_steps(const DataLoader* loader) {
    return (long)(loader->num_samples / loader->config.samples_per_step);
}

static void order_epoch(DataLoader* loader, uint64_t epoch) {
    if (loader->ordered_epoch == epoch) return;
    uint64_t n = (uint64_t)loader->num_shards, first = 0;
    for (uint64_t place = 0; place < n; place++) {
        int s = (int)rng_permute(loader->config.seed, RNG_SHARDS + epoch, n, place);
        loader->order[place] = s;
        loader->first_sample[place] = first;
        first += loader->shards[s].num_samples;
    }
    loader->first_sample[n] = first;
    loader->ordered_epoch = epoch;
}

// Shard and sample inside it of global index `index`, counted over all epochs.
static void locate(DataLoader* loader, uint64_t index, int* shard, uint64_t* sample) {
    uint64_t epoch = index / loader->num_samples, in_epoch = index % loader->num_samples;
    order_epoch(loader, epoch);
    int low = 0, high = loader->num_shards - 1; // the last place that begins at or before in_epoch
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (loader->first_sample[middle] <= in_epoch)
            low = middle;
        else
            high = middle - 1;
    }
    int s = loader->order[low];
    uint64_t seed = loader->config.seed ^ mix64((uint64_t)s + 1);
    *shard = s;
    *sample = rng_permute(seed, RNG_SHARDS + epoch, loader->shards[s].num_samples,
                          in_epoch - loader->first_sample[low]);
}

// ---- reading ------------------------------------------------------------------------------------

static bool read_sample(DataLoader* loader, int s, uint64_t sample, int* inputs, int* targets,
                        Error* error) {
    const Shard* shard = &loader->shards[s];
    int T = loader->config.T, V = loader->config.V;
    uint64_t first = sample * (uint64_t)T;
    uint64_t offset = (uint64_t)shard->header_bytes + first * (uint64_t)shard->token_bytes;
    size_t bytes = ((size_t)T + 1) * (size_t)shard->token_bytes;
    if (!use_shard(loader, s, error) ||
        !read_shard(shard, loader->fd, loader->raw, bytes, offset, error))
        return false;
    for (int t = 0; t <= T; t++) {
        uint32_t token = token_at(loader->raw, shard->token_bytes, (size_t)t);
        // Checked again even after dataloader_check: an id beyond wte must never reach a kernel,
        // whatever happened to the file since.
        if (token >= (uint32_t)V) return bad_token(shard, first + (uint64_t)t, token, V, error);
        if (t < T) inputs[t] = (int)token;
        if (t > 0) targets[t - 1] = (int)token;
    }
    return true;
}

bool dataloader_batch(DataLoader* loader, long step, int micro, int rank, int world_size, int B,
                      int* inputs, int* targets, Error* error) {
    uint64_t in_step = ((uint64_t)micro * (uint64_t)world_size + (uint64_t)rank) * (uint64_t)B;
    uint64_t first = (uint64_t)(step - 1) * loader->config.samples_per_step + in_step;
    for (int b = 0; b < B; b++) {
        int shard;
        uint64_t sample;
        locate(loader, first + (uint64_t)b, &shard, &sample);
        size_t row = (size_t)b * (size_t)loader->config.T;
        if (!read_sample(loader, shard, sample, inputs + row, targets + row, error)) return false;
    }
    return true;
}

uint64_t dataloader_val_count(const DataLoader* loader, long max_batches, long total_batch_tokens) {
    if (max_batches < 0) return loader->num_samples;
    uint64_t per_batch = (uint64_t)total_batch_tokens / (uint64_t)loader->config.T;
    uint64_t wanted = (uint64_t)max_batches * per_batch;
    return wanted < loader->num_samples ? wanted : loader->num_samples;
}

bool dataloader_val_sequence(DataLoader* loader, uint64_t index, int* inputs, int* targets,
                             Error* error) {
    for (int s = 0; s < loader->num_shards; s++) {
        uint64_t n = loader->shards[s].num_samples;
        if (index < n) return read_sample(loader, s, index, inputs, targets, error);
        index -= n;
    }
    DIE("sequence beyond the %llu of %s", (unsigned long long)loader->num_samples,
        loader->config.pattern);
}

// ---- identity -----------------------------------------------------------------------------------

DataFile* dataloader_identity(DataLoader* loader, Error* error) {
    enum { END_BYTES = 64 << 10 };
    DataFile* files = checked_calloc((size_t)loader->num_shards, sizeof(DataFile));
    unsigned char* end = checked_malloc(END_BYTES);
    bool ok = true;
    for (int s = 0; ok && s < loader->num_shards; s++) {
        const Shard* shard = &loader->shards[s];
        DataFile* file = &files[s];
        size_t bytes = (size_t)(shard->file_bytes < END_BYTES ? shard->file_bytes : END_BYTES);
        if (strlen(shard->name) >= sizeof file->name)
            ok = error_set(error, EXIT_USAGE, "%s: name of more than %zu bytes", shard->path,
                           sizeof file->name - 1);
        else
            strcpy(file->name, shard->name);
        file->bytes = shard->file_bytes;
        file->crc32 = (uint32_t)crc32(0, NULL, 0);
        ok = ok && use_shard(loader, s, error);
        for (int last = 0; ok && last < 2; last++) {
            uint64_t offset = last ? shard->file_bytes - bytes : 0;
            ok = read_shard(shard, loader->fd, end, bytes, offset, error);
            if (ok) file->crc32 = (uint32_t)crc32(file->crc32, end, (unsigned)bytes);
        }
    }
    free(end);
    if (ok) return files;
    free(files);
    return NULL;
}
