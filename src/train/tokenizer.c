// train/tokenizer.c - reading gpt2_tokenizer.bin and turning ids into text.
//
// Format (llm.c): 256 uint32 (magic 20240328, version 1 or 2, number of tokens, in version 2 the id
// of end-of-text, zeros), then for each token one byte with its length and its bytes.
#include "train/tokenizer.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/files.h"

enum { MAGIC = 20240328, HEADER_BYTES = 1024, MAX_TOKENS = 1 << 24 };

// ---- opening ------------------------------------------------------------------------------------

// Path of the file beside the shards, else in the current folder; NULL: in neither.
static const char* find_file(const char* train_data, char path[PATH_MAX]) {
    const char* slash = train_data ? strrchr(train_data, '/') : NULL;
    if (slash) {
        int length = (int)(slash - train_data);
        if (snprintf(path, PATH_MAX, "%.*s/" TOKENIZER_FILE, length, train_data) < PATH_MAX &&
            access(path, F_OK) == 0)
            return path;
    }
    return access(TOKENIZER_FILE, F_OK) == 0 ? TOKENIZER_FILE : NULL;
}

static bool read_tokens(Tokenizer* tokenizer, FILE* file, const char* path, Error* error) {
    uint32_t header[HEADER_BYTES / 4];
    if (fread(header, 1, sizeof header, file) != sizeof header)
        return error_set(error, EXIT_USAGE, "%s: shorter than its header of %d bytes", path,
                         HEADER_BYTES);
    if (header[0] != MAGIC)
        return error_set(error, EXIT_USAGE, "%s: magic %u, expected %d", path, header[0], MAGIC);
    if (header[1] != 1 && header[1] != 2)
        return error_set(error, EXIT_USAGE, "%s: version %u, expected 1 or 2", path, header[1]);
    if (header[2] < 1 || header[2] > MAX_TOKENS)
        return error_set(error, EXIT_USAGE, "%s: number of tokens %u, expected 1 to %d", path,
                         header[2], MAX_TOKENS);
    int n = (int)header[2];
    tokenizer->offsets = checked_calloc((size_t)n + 1, sizeof(uint32_t));
    size_t capacity = 0, used = 0;
    for (int id = 0; id < n; id++) {
        int length = fgetc(file);
        if (used + 255 > capacity) {
            capacity = 2 * capacity + 4096;
            tokenizer->text = realloc(tokenizer->text, capacity);
            CHECK(tokenizer->text, "out of memory");
        }
        if (length == EOF ||
            fread(tokenizer->text + used, 1, (size_t)length, file) != (size_t)length)
            return error_set(error, EXIT_USAGE, "%s: ends at token %d of %d", path, id, n);
        used += (size_t)length;
        tokenizer->offsets[id + 1] = (uint32_t)used;
    }
    if (fgetc(file) != EOF)
        return error_set(error, EXIT_USAGE, "%s: more bytes than its %d tokens", path, n);
    tokenizer->num_tokens = n;
    return true;
}

bool tokenizer_open(Tokenizer* tokenizer, const char* path, const char* train_data, int V,
                    Error* error) {
    memset(tokenizer, 0, sizeof *tokenizer);
    tokenizer->V = V;
    tokenizer->is_byte_level = V <= 257;
    if (tokenizer->is_byte_level) return true;
    char found[PATH_MAX];
    if (!path) path = find_file(train_data, found);
    if (!path) return true;
    uint64_t bytes;
    int fd = open_regular(path, &bytes, error);
    if (fd < 0) return false;
    FILE* file = fdopen(fd, "rb");
    CHECK(file, "%s: out of memory", path);
    bool ok = read_tokens(tokenizer, file, path, error);
    fclose(file);
    if (!ok) tokenizer_close(tokenizer);
    return ok;
}

void tokenizer_close(Tokenizer* tokenizer) {
    free(tokenizer->text);
    free(tokenizer->offsets);
    memset(tokenizer, 0, sizeof *tokenizer);
}

// ---- ids to text --------------------------------------------------------------------------------

bool tokenizer_has_text(const Tokenizer* tokenizer) {
    return tokenizer->is_byte_level || tokenizer->num_tokens > 0;
}

const unsigned char* tokenizer_token(const Tokenizer* tokenizer, int id, size_t* length) {
    static unsigned char bytes[256];
    if (tokenizer->is_byte_level) {
        *length = id < 256;
        if (id >= 256) return bytes;
        bytes[id] = (unsigned char)id;
        return &bytes[id];
    }
    if (id >= tokenizer->num_tokens) { // the model's vocabulary is larger than the file's
        static const unsigned char unknown[] = "\xEF\xBF\xBD"; // U+FFFD
        *length = 3;
        return unknown;
    }
    *length = tokenizer->offsets[id + 1] - tokenizer->offsets[id];
    return tokenizer->text + tokenizer->offsets[id];
}

// Length of the UTF-8 character at p, 0 if there is none (RFC 3629: no overlong forms, surrogates
// or values above U+10FFFF).
static int utf8_length(const unsigned char* p) {
    if (p[0] < 0x80) return 1;
    int n = p[0] >= 0xC2 && p[0] <= 0xDF   ? 2
            : (p[0] & 0xF0) == 0xE0        ? 3
            : p[0] >= 0xF0 && p[0] <= 0xF4 ? 4
                                           : 0;
    for (int i = 1; i < n; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) ||
        (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F))
        return 0;
    return n;
}

// A copy in which every byte that is not part of UTF-8 has become U+FFFD: JSON holds nothing else,
// and tools take output with other bytes in it for a binary file.
static char* to_utf8(const char* text) {
    char* out = checked_malloc(3 * strlen(text) + 1);
    char* to = out;
    for (const unsigned char* p = (const unsigned char*)text; *p;) {
        int n = utf8_length(p);
        memcpy(to, n ? (const char*)p : "\xEF\xBF\xBD", (size_t)(n ? n : 3));
        to += n ? n : 3;
        p += n ? n : 1;
    }
    *to = '\0';
    return out;
}

char* tokenizer_decode(const Tokenizer* tokenizer, const int* ids, int num_ids) {
    char* out = checked_malloc((size_t)num_ids * 256 + 1);
    char* to = out;
    for (int i = 0; i < num_ids; i++) {
        if (!tokenizer_has_text(tokenizer)) {
            to += sprintf(to, "%s%d", i ? " " : "", ids[i]);
            continue;
        }
        size_t length;
        const unsigned char* token = tokenizer_token(tokenizer, ids[i], &length);
        for (size_t j = 0; j < length; j++)
            if (token[j]) *to++ = (char)token[j];
    }
    *to = '\0';
    char* text = to_utf8(out);
    free(out);
    return text;
}

int tokenizer_start_token(const Tokenizer* tokenizer) {
    return tokenizer->is_byte_level && tokenizer->V > '\n' ? '\n' : tokenizer->V - 1;
}

// ---- prompts ------------------------------------------------------------------------------------

static int* encode_bytes(const Tokenizer* tokenizer, const char* prompt, int* num_ids,
                         Error* error) {
    if (!tokenizer->is_byte_level) {
        error_set(error, EXIT_USAGE,
                  "--prompt needs a byte-level model and this one has V = %d, give token ids: "
                  "--prompt-tokens ID,ID,...",
                  tokenizer->V);
        return NULL;
    }
    size_t length = strlen(prompt);
    int* ids = checked_malloc((length + 1) * sizeof(int));
    for (size_t i = 0; i < length; i++) {
        ids[i] = (unsigned char)prompt[i];
        if (ids[i] < tokenizer->V) continue;
        error_set(error, EXIT_USAGE, "--prompt: byte %d at %zu, expected below the model's V of %d",
                  ids[i], i, tokenizer->V);
        free(ids);
        return NULL;
    }
    *num_ids = (int)length;
    return ids;
}

static int* parse_ids(const Tokenizer* tokenizer, const char* list, int* num_ids, Error* error) {
    int* ids = checked_malloc((strlen(list) + 1) * sizeof(int));
    *num_ids = 0;
    for (const char* at = list;; at++) {
        char* end;
        long id = strtol(at, &end, 10);
        if (*at < '0' || *at > '9' || (*end != ',' && *end != '\0')) {
            error_set(error, EXIT_USAGE,
                      "--prompt-tokens %s: '%s' does not begin with a token id and "
                      "a comma, expected ID,ID,...",
                      list, at);
            break;
        }
        if (id >= tokenizer->V) {
            error_set(error, EXIT_USAGE,
                      "--prompt-tokens: id %ld, expected below the model's V of %d", id,
                      tokenizer->V);
            break;
        }
        ids[(*num_ids)++] = (int)id;
        if (*end == '\0') return ids;
        at = end;
    }
    free(ids);
    return NULL;
}

int* tokenizer_prompt(const Tokenizer* tokenizer, const char* prompt, const char* prompt_tokens,
                      int* num_ids, Error* error) {
    if (prompt) return encode_bytes(tokenizer, prompt, num_ids, error);
    return parse_ids(tokenizer, prompt_tokens, num_ids, error);
}
