// train/safetensors.c - see safetensors.h.
#include "train/safetensors.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/files.h"
#include "train/json.h"

enum { MAX_NAME = 255 };

// ---- header -------------------------------------------------------------------------------------

// Bits per element of the format's types, 0: unknown. Tensors of all of them may stand in a file;
// F32, F16 and BF16 can be read.
static unsigned dtype_bits(const char* dtype) {
    static const struct {
        const char* name;
        unsigned bits;
    } types[] = {{"BOOL", 8}, {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8},
                 {"I16", 16}, {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},
                 {"U32", 32}, {"F32", 32}, {"F64", 64}, {"I64", 64},    {"U64", 64}};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        if (strcmp(types[i].name, dtype) == 0) return types[i].bits;
    }
    return 0;
}

// One line per message: a name with anything but printable ASCII in it does not get that far.
static bool name_is_plain(const char* name) {
    size_t n = strlen(name);
    for (size_t i = 0; i < n; i++) {
        if (name[i] < 0x21 || name[i] > 0x7E) return false;
    }
    return n > 0 && n <= MAX_NAME;
}

static bool parse_tensor(SafeTensor* tensor, const cJSON* entry, uint64_t data_bytes,
                         JsonContext c) {
    const char* name = entry->string;
    if (!name_is_plain(name)) {
        return error_set(c.error, EXIT_USAGE, "%s: a tensor's name is empty, too long or not ASCII",
                         c.where);
    }
    char where[600];
    snprintf(where, sizeof(where), "%.300s: tensor %s", c.where, name);
    JsonContext inner = {where, c.error};
    if (!cJSON_IsObject(entry))
        return error_set(c.error, EXIT_USAGE, "%s: expected an object", where);
    const char* dtype = json_get_string(entry, "dtype", inner);
    const cJSON* shape = json_get_array(entry, "shape", SAFETENSORS_MAX_DIMS, inner);
    const cJSON* offsets = json_get_array(entry, "data_offsets", 2, inner);
    if (c.error->code != 0) return false;
    unsigned bits = dtype_bits(dtype);
    if (bits == 0) return error_set(c.error, EXIT_USAGE, "%s: unknown dtype '%.20s'", where, dtype);
    if (cJSON_GetArraySize(entry) != 3) {
        return error_set(c.error, EXIT_USAGE, "%s: expected dtype, shape and data_offsets only",
                         where);
    }
    if (cJSON_GetArraySize(offsets) != 2) {
        return error_set(c.error, EXIT_USAGE, "%s: data_offsets needs 2 numbers", where);
    }
    snprintf(tensor->dtype, sizeof(tensor->dtype), "%s", dtype);
    tensor->elems = 1;
    for (const cJSON* dim = shape->child; dim; dim = dim->next) {
        uint64_t size =
            (uint64_t)json_check_integer(dim, "a dimension", 0, JSON_MAX_INTEGER, inner);
        tensor->shape[tensor->num_dims++] = size;
        if (__builtin_mul_overflow(tensor->elems, size, &tensor->elems)) {
            return error_set(c.error, EXIT_USAGE, "%s: shape overflows", where);
        }
    }
    int64_t data_end = (int64_t)data_bytes;
    tensor->begin =
        (uint64_t)json_check_integer(offsets->child, "data_offsets[0]", 0, data_end, inner);
    tensor->end =
        (uint64_t)json_check_integer(offsets->child->next, "data_offsets[1]", 0, data_end, inner);
    if (c.error->code != 0) return false;
    uint64_t bytes;
    if (tensor->begin > tensor->end || __builtin_mul_overflow(tensor->elems, bits / 8, &bytes) ||
        bytes != tensor->end - tensor->begin) {
        return error_set(c.error, EXIT_USAGE,
                         "%s: data_offsets [%llu, %llu] do not fit shape and dtype %s", where,
                         (unsigned long long)tensor->begin, (unsigned long long)tensor->end, dtype);
    }
    tensor->name = checked_malloc(strlen(name) + 1);
    strcpy(tensor->name, name);
    return true;
}

static int compare_names(const void* a, const void* b) {
    return strcmp(((const SafeTensor*)a)->name, ((const SafeTensor*)b)->name);
}

static int compare_begins(const void* a, const void* b) {
    const SafeTensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end; // empty tensors first
}

// The tensors tile [0, data_bytes): no gap, no overlap, nothing behind the last.
static bool check_tiling(SafeTensors* file, uint64_t data_bytes, Error* error) {
    uint64_t expected = 0;
    qsort(file->tensors, file->num_tensors, sizeof(SafeTensor), compare_begins);
    for (size_t i = 0; i < file->num_tensors; i++) {
        const SafeTensor* t = &file->tensors[i];
        if (t->begin != expected) {
            return error_set(error, EXIT_USAGE,
                             "%s: tensor %s begins at byte %llu, expected %llu (%s)", file->path,
                             t->name, (unsigned long long)t->begin, (unsigned long long)expected,
                             t->begin < expected ? "overlap" : "gap");
        }
        expected = t->end;
    }
    if (expected != data_bytes) {
        return error_set(error, EXIT_USAGE, "%s: tensors end at byte %llu of %llu bytes of data",
                         file->path, (unsigned long long)expected, (unsigned long long)data_bytes);
    }
    return true;
}

bool safetensors_parse(SafeTensors* file, const char* path, const char* header, size_t header_bytes,
                       uint64_t data_bytes, Error* error) {
    memset(file, 0, sizeof(*file));
    file->fd = -1;
    file->path = checked_malloc(strlen(path) + 1);
    strcpy(file->path, path);
    JsonContext c = {path, error};
    bool ok = true;
    cJSON* tree = NULL;
    if (data_bytes > (uint64_t)JSON_MAX_INTEGER) {
        ok = error_set(error, EXIT_USAGE, "%s: too large", path);
    } else if (header_bytes == 0 || header[0] != '{') { // the format allows no space before it
        ok = error_set(error, EXIT_USAGE, "%s: header does not start with '{'", path);
    } else {
        tree = json_parse(header, header_bytes, c);
        ok = tree != NULL;
    }
    if (ok) {
        file->tensors = checked_calloc((size_t)cJSON_GetArraySize(tree), sizeof(SafeTensor));
        for (const cJSON* entry = tree->child; entry && ok; entry = entry->next) {
            if (strcmp(entry->string, "__metadata__") == 0) continue;
            ok = parse_tensor(&file->tensors[file->num_tensors], entry, data_bytes, c);
            if (ok) file->num_tensors++;
        }
    }
    cJSON_Delete(tree);
    ok = ok && check_tiling(file, data_bytes, error);
    if (ok) qsort(file->tensors, file->num_tensors, sizeof(SafeTensor), compare_names);
    if (!ok) safetensors_close(file);
    return ok;
}

// ---- files --------------------------------------------------------------------------------------

// Reads the header of an open file of `size` bytes and checks it.
static bool open_header(SafeTensors* file, const char* path, int fd, uint64_t size, Error* error) {
    unsigned char prefix[8];
    if (size < sizeof(prefix) || !read_at(fd, prefix, sizeof(prefix), 0)) {
        return error_set(error, EXIT_USAGE, "%s: %llu bytes, too short for a safetensors file",
                         path, (unsigned long long)size);
    }
    if (memcmp(prefix, "version ", sizeof(prefix)) == 0) {
        return error_set(error, EXIT_USAGE,
                         "%s: a Git LFS pointer, not the weights: git lfs pull fetches them", path);
    }
    uint64_t header_bytes = 0;
    for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | prefix[i];
    if (header_bytes > SAFETENSORS_MAX_HEADER || header_bytes > size - sizeof(prefix)) {
        return error_set(error, EXIT_USAGE,
                         "%s: header of %llu bytes (at most %d, and within the file's %llu bytes)",
                         path, (unsigned long long)header_bytes, SAFETENSORS_MAX_HEADER,
                         (unsigned long long)size);
    }
    char* header = checked_malloc(header_bytes);
    bool ok = read_at(fd, header, header_bytes, sizeof(prefix));
    if (!ok) error_set(error, EXIT_USAGE, "%s: cannot read its header", path);
    uint64_t data_start = sizeof(prefix) + header_bytes;
    ok = ok && safetensors_parse(file, path, header, header_bytes, size - data_start, error);
    if (ok) file->data_start = data_start;
    free(header);
    return ok;
}

bool safetensors_open(SafeTensors* file, const char* path, Error* error) {
    uint64_t bytes;
    int fd = open_regular(path, &bytes, error);
    if (fd < 0) return false;
    bool ok = open_header(file, path, fd, bytes, error);
    if (ok) file->fd = fd;
    if (!ok) close(fd);
    return ok;
}

void safetensors_close(SafeTensors* file) {
    for (size_t i = 0; i < file->num_tensors; i++) free(file->tensors[i].name);
    free(file->tensors);
    free(file->path);
    if (file->fd >= 0) close(file->fd);
    memset(file, 0, sizeof(*file));
    file->fd = -1;
}

const SafeTensor* safetensors_find(const SafeTensors* file, const char* name) {
    SafeTensor key = {.name = (char*)name};
    if (file->num_tensors == 0) return NULL;
    return bsearch(&key, file->tensors, file->num_tensors, sizeof(SafeTensor), compare_names);
}

bool read_floats_at(int fd, uint64_t offset, DType dtype, size_t count, float* out) {
    size_t bytes = dtype_bytes(dtype);
    // 16-bit elements are read into the upper half of `out` and widened from the front: the write
    // of element i ends before what is still unread.
    char* raw = (char*)out + (4 - bytes) * count;
    if (!read_at(fd, raw, count * bytes, offset)) return false;
    for (size_t i = 0; i < count && bytes == 2; i++) {
        uint16_t bits;
        memcpy(&bits, raw + 2 * i, 2);
        out[i] = dtype == DTYPE_BF16 ? bf16_bits_to_float(bits) : fp16_bits_to_float(bits);
    }
    return true;
}

static bool dtype_from_name(const char* name, DType* dtype) {
    if (strcmp(name, "F32") == 0)
        *dtype = DTYPE_FP32;
    else if (strcmp(name, "BF16") == 0)
        *dtype = DTYPE_BF16;
    else if (strcmp(name, "F16") == 0)
        *dtype = DTYPE_FP16;
    else
        return false;
    return true;
}

bool safetensors_read(const SafeTensors* file, const SafeTensor* tensor, uint64_t first,
                      size_t count, float* out, Error* error) {
    DType dtype;
    CHECK(first <= tensor->elems && count <= tensor->elems - first, "%s: range beyond tensor %s",
          file->path, tensor->name);
    if (!dtype_from_name(tensor->dtype, &dtype)) {
        return error_set(error, EXIT_USAGE, "%s: tensor %s has dtype %s, expected F32, F16 or BF16",
                         file->path, tensor->name, tensor->dtype);
    }
    uint64_t offset = file->data_start + tensor->begin + first * dtype_bytes(dtype);
    if (read_floats_at(file->fd, offset, dtype, count, out)) return true;
    return error_set(error, EXIT_FILE_IO, "%s: cannot read tensor %s: %s", file->path, tensor->name,
                     errno ? strerror(errno) : "it has shrunk");
}

// ---- writing ------------------------------------------------------------------------------------

static void PRINTF_LIKE(2, 3) append(SafeTensorsHeader* header, const char* fmt, ...) {
    char piece[MAX_NAME + 200];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(piece, sizeof(piece), fmt, args);
    va_end(args);
    CHECK(n >= 0 && (size_t)n < sizeof(piece), "header entry too long");
    if (header->length + (size_t)n > header->capacity) {
        header->capacity = 2 * header->capacity + (size_t)n;
        header->text = realloc(header->text, header->capacity);
        CHECK(header->text, "out of host memory: %zu bytes", header->capacity);
    }
    memcpy(header->text + header->length, piece, (size_t)n);
    header->length += (size_t)n;
}

void safetensors_header_begin(SafeTensorsHeader* header) {
    memset(header, 0, sizeof(*header));
    append(header, "%8s{\"__metadata__\":{\"format\":\"pt\"}", ""); // 8 bytes for the length
}

void safetensors_header_add(SafeTensorsHeader* header, const char* name_prefix, const char* name,
                            int num_dims, const size_t* shape) {
    append(header, ",\"%s%s\":{\"dtype\":\"F32\",\"shape\":[", name_prefix, name);
    uint64_t begin = header->data_bytes, elems = 1;
    for (int d = 0; d < num_dims; d++) {
        append(header, "%s%zu", d > 0 ? "," : "", shape[d]);
        elems *= shape[d];
    }
    header->data_bytes += elems * sizeof(float);
    append(header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
           (unsigned long long)header->data_bytes);
}

void safetensors_header_end(SafeTensorsHeader* header) {
    append(header, "}");
    append(header, "%*s", (int)(round_up(header->length, 8) - header->length), "");
    uint64_t header_bytes = header->length - 8;
    for (int i = 0; i < 8; i++) header->text[i] = (char)(header_bytes >> (8 * i) & 0xFF);
}
