// train/hellaswag.c - reading and scoring HellaSwag examples.
//
// Format (llm.c): 256 int32 (magic 20240522, version 1, number of examples, bytes of the longest
// example, zeros), then each example as uint16: 65535, its size in bytes, its index, the label, the
// number of endings, then context and each ending as a length and so many tokens.
#include "train/hellaswag.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/files.h"

enum { MAGIC = 20240522, VERSION = 1, HEADER_BYTES = 1024 };
enum { START_MARK = 65535, MAX_EXAMPLES = 65535, MAX_EXAMPLE_BYTES = 65534 };
enum { AT_MARK, AT_BYTES, AT_INDEX, AT_LABEL, AT_ENDINGS, AT_CONTEXT, FIXED_FIELDS = AT_CONTEXT };

const char* hellaswag_find(void) {
    static const char* const paths[] = {"data/hellaswag/hellaswag_val.bin",
                                        "dev/data/hellaswag/hellaswag_val.bin"};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
        if (access(paths[i], F_OK) == 0) return paths[i];
    return NULL;
}

// ---- one example --------------------------------------------------------------------------------

// Where its parts are in the uint16 of a checked example.
typedef struct {
    int context, num_context; // first token, number of tokens
    int ending[HELLASWAG_ENDINGS], num_ending[HELLASWAG_ENDINGS];
} Parts;

static bool read_bytes(const HellaSwag* eval, void* out, size_t bytes, uint64_t offset,
                       Error* error) {
    if (read_at(eval->fd, out, bytes, offset)) return true;
    if (errno)
        return error_set(error, EXIT_FILE_IO, "%s: cannot be read at byte %llu: %s", eval->path,
                         (unsigned long long)offset, strerror(errno));
    return error_set(error, EXIT_USAGE, "%s: size %llu bytes, expected %llu at least", eval->path,
                     (unsigned long long)eval->file_bytes,
                     (unsigned long long)offset + (unsigned long long)bytes);
}

static bool bad_field(const HellaSwag* eval, int example, const char* field, int value,
                      const char* expected, int limit, Error* error) {
    return error_set(error, EXIT_USAGE, "%s: example %d: %s %d, expected %s%s%d", eval->path,
                     example, field, value, expected, *expected ? " " : "", limit);
}

// One list of tokens that begins with its length at *at.
static bool take_tokens(const HellaSwag* eval, int example, const char* field, int words, int V,
                        int* at, int* first, int* count, Error* error) {
    *count = *at < words ? eval->raw[*at] : 0;
    *first = *at + 1;
    if (*count == 0) return bad_field(eval, example, field, 0, "tokens, at least", 1, error);
    if (*first + *count > words)
        return bad_field(eval, example, field, *count, "tokens that fit into its words, at most",
                         words > *first ? words - *first : 0, error);
    for (int i = 0; i < *count; i++)
        if (eval->raw[*first + i] >= V)
            return bad_field(eval, example, field, eval->raw[*first + i],
                             "token ids below the model's V of", V, error);
    *at = *first + *count;
    return true;
}

// Reads example `e`, which begins at eval->offsets[e], into eval->raw and finds its parts.
static bool read_example(HellaSwag* eval, int e, int V, Parts* parts, int* bytes, Error* error) {
    uint16_t* raw = eval->raw;
    if (!read_bytes(eval, raw, FIXED_FIELDS * sizeof *raw, eval->offsets[e], error)) return false;
    *bytes = raw[AT_BYTES];
    if (raw[AT_MARK] != START_MARK)
        return bad_field(eval, e, "start mark", raw[AT_MARK], "", START_MARK, error);
    if (raw[AT_ENDINGS] != HELLASWAG_ENDINGS)
        return bad_field(eval, e, "number of endings", raw[AT_ENDINGS], "", HELLASWAG_ENDINGS,
                         error);
    if (raw[AT_LABEL] >= HELLASWAG_ENDINGS)
        return bad_field(eval, e, "label", raw[AT_LABEL], "below", HELLASWAG_ENDINGS, error);
    if (*bytes < (int)(FIXED_FIELDS * sizeof *raw) || *bytes % 2 != 0)
        return bad_field(eval, e, "bytes", *bytes, "an even number of at least",
                         (int)(FIXED_FIELDS * sizeof *raw), error);
    if (!read_bytes(eval, raw, (size_t)*bytes, eval->offsets[e], error)) return false;

    int words = *bytes / 2, at = AT_CONTEXT;
    if (!take_tokens(eval, e, "context", words, V, &at, &parts->context, &parts->num_context,
                     error))
        return false;
    for (int i = 0; i < HELLASWAG_ENDINGS; i++)
        if (!take_tokens(eval, e, "ending", words, V, &at, &parts->ending[i], &parts->num_ending[i],
                         error))
            return false;
    if (at != words)
        return bad_field(eval, e, "bytes", *bytes, "as its tokens take,", 2 * at, error);
    return true;
}

// ---- the file -----------------------------------------------------------------------------------

static bool read_header(HellaSwag* eval, Error* error) {
    int32_t header[HEADER_BYTES / 4];
    if (!read_bytes(eval, header, sizeof header, 0, error)) return false;
    if (header[0] != MAGIC)
        return error_set(error, EXIT_USAGE, "%s: magic %d, expected %d", eval->path, header[0],
                         MAGIC);
    if (header[1] != VERSION)
        return error_set(error, EXIT_USAGE, "%s: version %d, expected %d", eval->path, header[1],
                         VERSION);
    if (header[2] < 1 || header[2] > MAX_EXAMPLES)
        return error_set(error, EXIT_USAGE, "%s: number of examples %d, expected 1 to %d",
                         eval->path, header[2], MAX_EXAMPLES);
    eval->num_examples = header[2];
    return true;
}

static bool read_all(HellaSwag* eval, int V, Error* error) {
    uint64_t offset = HEADER_BYTES;
    for (int e = 0; e < eval->num_examples; e++) {
        Parts parts;
        int bytes;
        eval->offsets[e] = offset;
        if (!read_example(eval, e, V, &parts, &bytes, error)) return false;
        offset += (uint64_t)bytes;
        eval->labels[e] = eval->raw[AT_LABEL];
        for (int i = 0; i < HELLASWAG_ENDINGS; i++) {
            // The first token of the context predicts the rest: T inputs hold T + 1 tokens.
            if (parts.num_ending[i] > eval->T)
                return bad_field(eval, e, "ending tokens", parts.num_ending[i],
                                 "to fit behind a context token into -t", eval->T, error);
            eval->row_tokens[e * HELLASWAG_ENDINGS + i] = parts.num_ending[i];
        }
    }
    if (eval->file_bytes == offset) return true;
    return error_set(error, EXIT_USAGE, "%s: size %llu bytes, expected %llu for its %d examples",
                     eval->path, (unsigned long long)eval->file_bytes, (unsigned long long)offset,
                     eval->num_examples);
}

bool hellaswag_open(HellaSwag* eval, const char* path, int T, int V, Error* error) {
    memset(eval, 0, sizeof *eval);
    eval->T = T;
    size_t length = strlen(path);
    CHECK(length < sizeof eval->path, "path of %zu bytes", length);
    memcpy(eval->path, path, length + 1);
    eval->fd = open_regular(path, &eval->file_bytes, error);
    if (eval->fd < 0) return false;
    bool ok = read_header(eval, error);
    if (ok) {
        size_t n = (size_t)eval->num_examples;
        eval->offsets = checked_calloc(n, sizeof *eval->offsets);
        eval->labels = checked_calloc(n, sizeof *eval->labels);
        eval->row_tokens = checked_calloc(n * HELLASWAG_ENDINGS, sizeof *eval->row_tokens);
        eval->raw = checked_malloc(MAX_EXAMPLE_BYTES);
        ok = read_all(eval, V, error);
    }
    if (!ok) hellaswag_close(eval);
    return ok;
}

void hellaswag_close(HellaSwag* eval) {
    if (eval->fd >= 0) close(eval->fd);
    free(eval->offsets);
    free(eval->labels);
    free(eval->row_tokens);
    free(eval->raw);
    memset(eval, 0, sizeof *eval);
    eval->fd = -1;
}

// ---- rows ---------------------------------------------------------------------------------------

bool hellaswag_row(HellaSwag* eval, int row, int* inputs, int* targets, Error* error) {
    Parts parts;
    int bytes, i = row % HELLASWAG_ENDINGS, T = eval->T;
    if (!read_example(eval, row / HELLASWAG_ENDINGS, START_MARK + 1, &parts, &bytes, error))
        return false;
    int num_ending = parts.num_ending[i], num_context = parts.num_context;
    int dropped = num_context + num_ending - (T + 1);
    if (dropped < 0) dropped = 0;
    const uint16_t* context = eval->raw + parts.context + dropped;
    const uint16_t* ending = eval->raw + parts.ending[i];
    num_context -= dropped;
    int total = num_context + num_ending;
    for (int t = 0; t < T; t++) {
        // Input t and its target, token t + 1; what pads the row is token 0 and has no target.
        int next = t + 1;
        inputs[t] = t < num_context ? context[t] : t < total ? ending[t - num_context] : 0;
        targets[t] = next >= num_context && next < total ? ending[next - num_context] : -1;
    }
    return true;
}

int hellaswag_correct(const HellaSwag* eval, const double* row_losses) {
    int correct = 0;
    for (int e = 0; e < eval->num_examples; e++) {
        int best = 0;
        double least = 0;
        for (int i = 0; i < HELLASWAG_ENDINGS; i++) {
            int row = e * HELLASWAG_ENDINGS + i;
            double mean = row_losses[row] / eval->row_tokens[row];
            if (i == 0 || mean < least) best = i, least = mean;
        }
        correct += best == eval->labels[e];
    }
    return correct;
}
