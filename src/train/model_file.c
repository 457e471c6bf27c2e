// train/model_file.c - see model_file.h.
#include "train/model_file.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/rng.h"
#include "train/files.h"
#include "train/json.h"
#include "train/state.h"
#include "train/watchdog.h"

enum {
    CONFIG_JSON_MAX = 1 << 20, // bytes
    INDEX_JSON_MAX = 64 << 20,
    CHUNK_ELEMS = 1 << 16, // of the small buffers here

    // llm.c's model files: 256 int32 of header, then the parameters.
    BIN_MAGIC = 20240326,
    BIN_HEADER_BYTES = 1024,
    BIN_FP32 = 3, // versions
    BIN_BF16 = 5,
    TENSORS_PER_BLOCK = 12,
    TENSORS_BEFORE_BLOCKS = 2, // wte, wpe
};

static bool exists(const char* path) {
    struct stat info;
    return stat(path, &info) == 0;
}

// ---- Hugging Face: which tensors the files hold -------------------------------------------------

static const SafeTensor* find_in_shards(const ModelFile* file, const char* name, int* shard) {
    for (int s = 0; s < file->num_shards; s++) {
        const SafeTensor* tensor = safetensors_find(&file->shards[s], name);
        if (!tensor) continue;
        *shard = s;
        return tensor;
    }
    *shard = -1;
    return NULL;
}

static const SafeTensor* find_tensor(const ModelFile* file, const char* name, int* shard) {
    char full[64];
    snprintf(full, sizeof(full), "%s%s", file->prefix, name);
    return find_in_shards(file, full, shard);
}

// "256 x 64"
static const char* shape_text(char out[200], int num_dims, const size_t* shape) {
    strcpy(out, "a number");
    for (int d = 0, n = 0; d < num_dims; d++)
        n += snprintf(out + n, 200 - (size_t)n, d ? " x %zu" : "%zu", shape[d]);
    return out;
}

static bool has_shape(const SafeTensor* tensor, int num_dims, const size_t* shape) {
    bool same = tensor->num_dims == num_dims;
    for (int d = 0; d < num_dims && same; d++) same = tensor->shape[d] == shape[d];
    return same;
}

// "h.3.attn.bias" and "h.3.attn.masked_bias": the causal mask that older transformers wrote along.
static bool is_mask_buffer(const char* name) {
    int layer = 0, length = 0;
    if (sscanf(name, "h.%9d.attn.%n", &layer, &length) != 1 || length == 0) return false;
    return strcmp(name + length, "bias") == 0 || strcmp(name + length, "masked_bias") == 0;
}

// A head of its own is not this model; the copy of wte that some writers add is left out.
static bool check_tied_head(const ModelFile* file, const SafeTensor* head, int head_shard,
                            Error* error) {
    int shard;
    const SafeTensor* wte = find_tensor(file, "wte.weight", &shard);
    float* values = checked_malloc(2 * CHUNK_ELEMS * sizeof(float));
    bool ok = has_shape(head, 2, file->table.tensors[0].shape);
    for (uint64_t first = 0; first < wte->elems && ok; first += CHUNK_ELEMS) {
        size_t count = min_size(CHUNK_ELEMS, wte->elems - first);
        if (!safetensors_read(&file->shards[shard], wte, first, count, values, error) ||
            !safetensors_read(&file->shards[head_shard], head, first, count, values + CHUNK_ELEMS,
                              error)) {
            break;
        }
        ok = memcmp(values, values + CHUNK_ELEMS, count * sizeof(float)) == 0;
    }
    free(values);
    if (!ok) {
        error_set(error, EXIT_USAGE,
                  "%s: lm_head.weight differs from wte.weight; only tied heads are "
                  "trained here",
                  file->path);
    }
    return error->code == 0;
}

// Every tensor of the table once and with its shape, and no other that would be dropped in silence.
static bool check_tensors(const ModelFile* file, Error* error) {
    int shard;
    for (int t = 0; t < file->table.num_tensors; t++) {
        const TensorSpec* spec = &file->table.tensors[t];
        const SafeTensor* tensor = find_tensor(file, spec->name, &shard);
        if (!tensor) {
            return error_set(error, EXIT_USAGE, "%s: tensor %s%s is missing", file->path,
                             file->prefix, spec->name);
        }
        if (!has_shape(tensor, spec->num_dims, spec->shape)) {
            char stored[200], expected[200];
            return error_set(error, EXIT_USAGE, "%s: tensor %s is %s, its config implies %s",
                             file->path, spec->name,
                             shape_text(stored, tensor->num_dims, tensor->shape),
                             shape_text(expected, spec->num_dims, spec->shape));
        }
    }
    size_t prefix = strlen(file->prefix);
    for (int s = 0; s < file->num_shards; s++) {
        for (size_t i = 0; i < file->shards[s].num_tensors; i++) {
            const SafeTensor* tensor = &file->shards[s].tensors[i];
            const char* name = tensor->name;
            if (strcmp(name, "lm_head.weight") == 0) {
                if (!check_tied_head(file, tensor, s, error)) return false;
                continue;
            }
            if (strncmp(name, file->prefix, prefix) == 0) name += prefix;
            if (is_mask_buffer(name)) continue;
            if (param_find(&file->table, name) < 0) {
                return error_set(error, EXIT_USAGE, "%s: tensor %s is not one of GPT-2's",
                                 file->shards[s].path, tensor->name);
            }
            if (find_in_shards(file, tensor->name, &shard) != tensor) {
                return error_set(error, EXIT_USAGE, "%s: tensor %s is also in %s",
                                 file->shards[s].path, tensor->name, file->shards[shard].path);
            }
        }
    }
    return true;
}

// ---- Hugging Face: opening ----------------------------------------------------------------------

static bool open_shard(ModelFile* file, const char* path, Error* error) {
    file->shards = realloc(file->shards, (size_t)(file->num_shards + 1) * sizeof(SafeTensors));
    CHECK(file->shards, "out of host memory: %d shards", file->num_shards + 1);
    if (!safetensors_open(&file->shards[file->num_shards], path, error)) return false;
    file->num_shards++;
    return true;
}

// The files that an index names, each once and beside the index.
static bool open_index(ModelFile* file, const char* dir, const char* index_path, Error* error) {
    enum { MAX_SHARDS = 1000 };
    size_t length;
    char* text = json_read_file(index_path, INDEX_JSON_MAX, &length, error);
    if (!text) return false;
    JsonContext c = {index_path, error};
    cJSON* root = json_parse(text, length, c);
    free(text);
    const cJSON* map = json_get_object(root, "weight_map", c);
    for (const cJSON* entry = map ? map->child : NULL; entry && error->code == 0;
         entry = entry->next) {
        char path[PATH_MAX];
        const char* name = cJSON_IsString(entry) ? entry->valuestring : "";
        if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') || strlen(name) > 200) {
            error_set(error, EXIT_USAGE, "%s: weight_map names a file that is not beside it",
                      index_path);
            break;
        }
        path_join(path, dir, name);
        bool is_open = false;
        for (int s = 0; s < file->num_shards; s++)
            is_open |= strcmp(file->shards[s].path, path) == 0;
        if (is_open) continue;
        if (file->num_shards == MAX_SHARDS) {
            error_set(error, EXIT_USAGE, "%s: more than %d files", index_path, MAX_SHARDS);
            break;
        }
        open_shard(file, path, error);
    }
    cJSON_Delete(root);
    if (error->code == 0 && file->num_shards == 0) {
        error_set(error, EXIT_USAGE, "%s: weight_map is empty", index_path);
    }
    return error->code == 0;
}

bool model_file_config(GPT2Config* config, const char* path, Error* error) {
    size_t length;
    char* text = json_read_file(path, CONFIG_JSON_MAX, &length, error);
    bool ok = text && config_from_json(config, text, length, path, error);
    free(text);
    return ok;
}

// Sizes as the tensors themselves have them; the number of heads leaves no trace in shapes.
static bool infer_config(ModelFile* file, Error* error) {
    int shard;
    const SafeTensor* wte = find_tensor(file, "wte.weight", &shard);
    const SafeTensor* wpe = find_tensor(file, "wpe.weight", &shard);
    bool ok = wte && wpe && wte->num_dims == 2 && wpe->num_dims == 2;
    for (int d = 0; d < 2 && ok; d++) ok = wte->shape[d] <= INT_MAX && wpe->shape[d] <= INT_MAX;
    if (!ok)
        return error_set(error, EXIT_USAGE, "%s: has no wte.weight and wpe.weight", file->path);
    GPT2Config config = {
        .NH = 1, .C = (int)wte->shape[1], .V = (int)wte->shape[0], .T = (int)wpe->shape[0]};
    char name[40];
    do {
        snprintf(name, sizeof(name), "h.%d.ln_1.weight", config.L);
    } while (find_tensor(file, name, &shard) && ++config.L);
    ok = gpt2_config_check(&config, file->path, error);
    config.NH = 0;
    file->config = config;
    return ok;
}

static bool open_directory(ModelFile* file, const char* dir, Error* error) {
    char config_path[PATH_MAX], weights_path[PATH_MAX], index_path[PATH_MAX];
    path_join(config_path, dir, "config.json");
    path_join(weights_path, dir, "model.safetensors");
    path_join(index_path, dir, "model.safetensors.index.json");
    if (!exists(config_path)) {
        char latest[PATH_MAX];
        path_join(latest, dir, "latest");
        return error_set(error, EXIT_USAGE, "%s: has no config.json%s%s", dir,
                         exists(latest) ? "; its newest checkpoint is " : "",
                         exists(latest) ? latest : "");
    }
    if (!model_file_config(&file->config, config_path, error)) return false;
    if (exists(weights_path)) return open_shard(file, weights_path, error);
    if (exists(index_path)) return open_index(file, dir, index_path, error);
    return error_set(error, EXIT_USAGE, "%s: has neither model.safetensors nor its index", dir);
}

static bool open_safetensors_file(ModelFile* file, Error* error) {
    char config_path[PATH_MAX];
    snprintf(config_path, sizeof(config_path), "%s", file->path);
    char* slash = strrchr(config_path, '/');
    snprintf(slash ? slash + 1 : config_path,
             sizeof(config_path) - (size_t)(slash ? slash + 1 - config_path : 0), "config.json");
    if (!open_shard(file, file->path, error)) return false;
    return !exists(config_path) || model_file_config(&file->config, config_path, error);
}

static bool open_hugging_face(ModelFile* file, bool is_directory, Error* error) {
    if (!(is_directory ? open_directory(file, file->path, error)
                       : open_safetensors_file(file, error))) {
        return false;
    }
    int shard;
    file->prefix = find_in_shards(file, "transformer.wte.weight", &shard) ? "transformer." : "";
    if (file->config.C == 0 && !infer_config(file, error)) return false;
    gpt2_param_table(&file->table, &file->config);
    return check_tensors(file, error);
}

// ---- llm.c --------------------------------------------------------------------------------------

// Elements of the file before the given tensor. Order: wte (padded), wpe, then for each of a
// block's twelve tensors all layers, then ln_f.
static uint64_t bin_offset(const ModelFile* file, int tensor) {
    const ParamTable* table = &file->table;
    uint64_t L = (uint64_t)file->config.L, C = (uint64_t)file->config.C;
    if (tensor == 0) return 0;
    uint64_t offset = (uint64_t)file->bin_padded_vocab * C;
    if (tensor == 1) return offset;
    int in_blocks = tensor - TENSORS_BEFORE_BLOCKS;
    bool is_behind = in_blocks >= TENSORS_PER_BLOCK * file->config.L; // ln_f
    int kind = is_behind ? TENSORS_PER_BLOCK : in_blocks % TENSORS_PER_BLOCK;
    offset += table->tensors[1].elems;
    for (int k = 0; k < kind; k++) offset += L * table->tensors[TENSORS_BEFORE_BLOCKS + k].elems;
    if (!is_behind) {
        return offset + (uint64_t)(in_blocks / TENSORS_PER_BLOCK) * table->tensors[tensor].elems;
    }
    return offset + (tensor == table->num_tensors - 1 ? C : 0);
}

static DType bin_dtype(const ModelFile* file) {
    return file->bin_version == BIN_FP32 ? DTYPE_FP32 : DTYPE_BF16;
}

// Elements [first, first + count) of the file's parameters as fp32.
static bool bin_read_elems(const ModelFile* file, uint64_t first, size_t count, float* out,
                           Error* error) {
    uint64_t offset = BIN_HEADER_BYTES + first * dtype_bytes(bin_dtype(file));
    if (read_floats_at(file->bin_fd, offset, bin_dtype(file), count, out)) return true;
    return error_set(error, EXIT_FILE_IO, "%s: cannot read its weights: %s", file->path,
                     errno ? strerror(errno) : "it has shrunk");
}

// The published (in, out) from the file's (out, in): one strip of every row of the file, scattered
// with stride `out`.
static bool bin_read_transposed(const ModelFile* file, int tensor, size_t first, size_t count,
                                float* out, Error* error) {
    const size_t* shape = file->table.tensors[tensor].shape;
    size_t num_in = shape[0], num_out = shape[1], end = first + count;
    size_t i_begin = first / num_out, i_end = ceil_div(end, num_out);
    float* strip = checked_malloc((i_end - i_begin) * sizeof(float));
    bool ok = true;
    for (size_t o = 0; o < num_out && ok; o++) {
        ok = bin_read_elems(file, bin_offset(file, tensor) + o * num_in + i_begin, i_end - i_begin,
                            strip, error);
        for (size_t i = i_begin; i < i_end && ok; i++) {
            size_t at = i * num_out + o;
            if (at >= first && at < end) out[at - first] = strip[i - i_begin];
        }
    }
    free(strip);
    return ok;
}

static bool open_bin(ModelFile* file, uint64_t size, Error* error) {
    int32_t header[BIN_HEADER_BYTES / 4];
    if (!read_at(file->bin_fd, header, sizeof(header), 0)) {
        return error_set(error, EXIT_USAGE, "%s: %llu bytes, shorter than its header of %d",
                         file->path, (unsigned long long)size, BIN_HEADER_BYTES);
    }
    file->bin_version = header[1];
    if (file->bin_version != BIN_FP32 && file->bin_version != BIN_BF16) {
        return error_set(error, EXIT_USAGE, "%s: version %d, expected %d (fp32) or %d (bf16)",
                         file->path, file->bin_version, BIN_FP32, BIN_BF16);
    }
    file->config = (GPT2Config){
        .L = header[4], .NH = header[5], .C = header[6], .V = header[3], .T = header[2]};
    file->bin_padded_vocab = header[7];
    if (!gpt2_config_check(&file->config, file->path, error)) return false;
    if (file->bin_padded_vocab < file->config.V ||
        file->bin_padded_vocab - file->config.V > 1 << 20) {
        return error_set(error, EXIT_USAGE, "%s: padded vocabulary %d for a vocabulary of %d",
                         file->path, file->bin_padded_vocab, file->config.V);
    }
    gpt2_param_table(&file->table, &file->config);
    int last = file->table.num_tensors - 1;
    uint64_t elems = bin_offset(file, last) + file->table.tensors[last].elems;
    uint64_t expected = BIN_HEADER_BYTES + elems * dtype_bytes(bin_dtype(file));
    if (size != expected) {
        return error_set(error, EXIT_USAGE, "%s: %llu bytes, its header implies %llu", file->path,
                         (unsigned long long)size, (unsigned long long)expected);
    }
    return true;
}

// What state.json beside the weights says; a folder that is not a checkpoint has none.
static long batch_of_run(const char* dir) {
    char path[PATH_MAX];
    size_t length;
    Error ignored = {0};
    path_join(path, dir, "state.json");
    char* text = json_read_file(path, STATE_JSON_MAX, &length, &ignored);
    if (!text) return 0;
    JsonContext c = {path, &ignored};
    cJSON* root = json_parse(text, length, c);
    long tokens = (long)json_get_integer(root, "total_batch_tokens", 1, INT64_C(1) << 53, c);
    cJSON_Delete(root);
    free(text);
    return ignored.code == 0 ? tokens : 0;
}

// ---- both ---------------------------------------------------------------------------------------

static bool open_path(ModelFile* file, const char* path, Error* error) {
    memset(file, 0, sizeof(*file));
    file->bin_fd = -1;
    file->prefix = "";
    file->is_open = true;
    file->path = checked_malloc(strlen(path) + 1);
    strcpy(file->path, path);
    for (size_t n = strlen(path); n > 1 && file->path[n - 1] == '/'; n--) file->path[n - 1] = '\0';
    struct stat info;
    if (strlen(file->path) > PATH_MAX - 300)
        return error_set(error, EXIT_USAGE, "-e: path too long");
    if (stat(file->path, &info) != 0) {
        return error_set(error, EXIT_USAGE, "%s: %s", file->path, strerror(errno));
    }
    if (S_ISDIR(info.st_mode)) {
        file->total_batch_tokens = batch_of_run(file->path);
        return open_hugging_face(file, true, error);
    }
    uint64_t bytes;
    file->bin_fd = open_regular(file->path, &bytes, error);
    if (file->bin_fd < 0) return false;
    int32_t magic = 0;
    if (read_at(file->bin_fd, &magic, sizeof(magic), 0) && magic == BIN_MAGIC)
        return open_bin(file, bytes, error);
    close(file->bin_fd);
    file->bin_fd = -1;
    size_t n = strlen(file->path);
    if (n > 4 && strcmp(file->path + n - 4, ".bin") == 0) {
        return error_set(error, EXIT_USAGE, "%s: magic %d, expected %d of an llm.c model file",
                         file->path, magic, BIN_MAGIC);
    }
    return open_hugging_face(file, false, error);
}

bool model_file_open(ModelFile* file, const char* path, Comm* comm, Error* error) {
    memset(file, 0, sizeof(*file));
    if (comm->rank == 0) {
        open_path(file, path, error);
        if (error->code == 0 && file->config.NH == 0) {
            error_set(error, EXIT_USAGE,
                      "%s: needs its config.json beside it, for the number of heads", path);
        }
    }
    if (!comm_all_ok(comm, error)) {
        model_file_close(file);
        return false;
    }
    comm->host_broadcast(comm, &file->config, sizeof(file->config), 0);
    comm->host_broadcast(comm, &file->total_batch_tokens, sizeof(file->total_batch_tokens), 0);
    return true;
}

void model_file_close(ModelFile* file) {
    if (!file->is_open) return;
    for (int s = 0; s < file->num_shards; s++) safetensors_close(&file->shards[s]);
    free(file->shards);
    free(file->path);
    if (file->table.tensors) param_table_free(&file->table);
    if (file->bin_fd >= 0) close(file->bin_fd);
    memset(file, 0, sizeof(*file));
}

bool model_file_read(const ModelFile* file, int tensor, size_t first, size_t count, float* out,
                     Error* error) {
    const TensorSpec* spec = &file->table.tensors[tensor];
    if (file->num_shards > 0) {
        int shard;
        const SafeTensor* stored = find_tensor(file, spec->name, &shard);
        return safetensors_read(&file->shards[shard], stored, first, count, out, error);
    }
    bool is_transposed = spec->num_dims == 2 && tensor >= TENSORS_BEFORE_BLOCKS;
    if (is_transposed) return bin_read_transposed(file, tensor, first, count, out, error);
    return bin_read_elems(file, bin_offset(file, tensor) + first, count, out, error);
}

// A rank 0 that cannot read goes on with what is in the buffer, since the others wait for it; the
// load fails as a whole.
bool model_file_load(const ModelFile* file, Zero* zero, const ParamTable* table, float* buffer,
                     size_t buffer_elems, Comm* comm, Error* error) {
    for (int t = 0; t < table->num_tensors; t++) {
        size_t elems = table->tensors[t].elems;
        for (size_t first = 0; first < elems; first += buffer_elems) {
            size_t count = min_size(buffer_elems, elems - first);
            if (comm->rank == 0 && error->code == 0) {
                model_file_read(file, t, first, count, buffer, error);
            }
            zero_write(zero, STATE_MASTER, t, first, count, buffer);
            watchdog_tick();
        }
    }
    zero_publish(zero);
    return comm_all_ok(comm, error);
}

bool model_file_hash(const char* path, uint64_t* hash, Error* error) {
    ModelFile file;
    uint64_t sum = 0, index = 0;
    float* values = checked_malloc(CHUNK_ELEMS * sizeof(float));
    bool ok = open_path(&file, path, error);
    for (int t = 0; t < file.table.num_tensors && ok; t++) {
        size_t elems = file.table.tensors[t].elems;
        for (size_t first = 0; first < elems && ok; first += CHUNK_ELEMS) {
            size_t count = min_size(CHUNK_ELEMS, elems - first);
            ok = model_file_read(&file, t, first, count, values, error);
            for (size_t i = 0; i < count && ok; i++, index++) {
                sum += mix64(index * 0x9E3779B97F4A7C15ull + float_bits(values[i]));
            }
        }
    }
    free(values);
    model_file_close(&file);
    *hash = sum;
    return ok;
}
