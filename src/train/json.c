// train/json.c - bounded, strict JSON. See json.h.
#include "train/json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train/files.h"

static bool fail(JsonContext c, const char* problem, const char* what) {
    return error_set(c.error, EXIT_USAGE, "%s: %s%s%s", c.where, problem, what[0] ? " " : "", what);
}

// ---- bounds -------------------------------------------------------------------------------------

// Depth, number of values and control bytes, without understanding more of the text than strings.
// cJSON recurses once per level and allocates per value, so this comes first.
static bool check_bounds(const char* text, size_t length, JsonContext c) {
    size_t depth = 0, values = 1;
    bool in_string = false;
    for (size_t i = 0; i < length; i++) {
        unsigned char ch = (unsigned char)text[i];
        if (in_string) {
            if (ch < 0x20) return fail(c, "control character inside a JSON string", "");
            if (ch == '\\') i++;
            if (ch == '"') in_string = false;
            continue;
        }
        if (ch < 0x20 && ch != '\n' && ch != '\r' && ch != '\t') {
            return fail(c, "is not JSON: control character", "");
        }
        if (ch == '"') in_string = true;
        if (ch == '[' || ch == '{') depth++;
        if ((ch == ']' || ch == '}') && depth > 0) depth--;
        if (ch == ',' || ch == '[' || ch == '{') values++;
        if (depth > JSON_MAX_DEPTH) {
            return error_set(c.error, EXIT_USAGE, "%s: JSON nested deeper than %d levels", c.where,
                             JSON_MAX_DEPTH);
        }
        if (values > JSON_MAX_VALUES) {
            return error_set(c.error, EXIT_USAGE, "%s: more than %d JSON values", c.where,
                             JSON_MAX_VALUES);
        }
    }
    return true;
}

static int compare_keys(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

// cJSON keeps every copy of a key that is given twice and finds the first; others find the last.
static bool check_duplicate_keys(const cJSON* value, JsonContext c) {
    size_t n = 0;
    for (const cJSON* child = value->child; child; child = child->next) {
        if (!check_duplicate_keys(child, c)) return false;
        n++;
    }
    if (!cJSON_IsObject(value) || n < 2) return true;
    const char** keys = checked_malloc(n * sizeof(*keys));
    n = 0;
    for (const cJSON* child = value->child; child; child = child->next) keys[n++] = child->string;
    qsort(keys, n, sizeof(*keys), compare_keys);
    bool unique = true;
    for (size_t i = 1; i < n && unique; i++) {
        if (strcmp(keys[i - 1], keys[i]) == 0) {
            unique =
                error_set(c.error, EXIT_USAGE, "%s: key '%.100s' is given twice", c.where, keys[i]);
        }
    }
    free(keys);
    return unique;
}

cJSON* json_parse(const char* text, size_t length, JsonContext c) {
    if (!check_bounds(text, length, c)) return NULL;
    const char* end = NULL;
    cJSON* tree = cJSON_ParseWithLengthOpts(text, length, &end, false);
    if (!tree) {
        error_set(c.error, EXIT_USAGE, "%s: is not JSON, at byte %zu", c.where,
                  end ? (size_t)(end - text) : (size_t)0);
        return NULL;
    }
    size_t rest = (size_t)(end - text);
    while (rest < length && strchr(" \t\r\n", text[rest])) rest++;
    bool ok = true;
    if (rest < length) {
        ok = error_set(c.error, EXIT_USAGE, "%s: text behind the JSON, at byte %zu", c.where, rest);
    } else if (!cJSON_IsObject(tree)) {
        ok = fail(c, "is not a JSON object", "");
    } else {
        ok = check_duplicate_keys(tree, c);
    }
    if (!ok) cJSON_Delete(tree);
    return ok ? tree : NULL;
}

// ---- files --------------------------------------------------------------------------------------

char* json_read_file(const char* path, size_t max_bytes, size_t* length, Error* error) {
    uint64_t bytes;
    int fd = open_regular(path, &bytes, error);
    if (fd < 0) return NULL;
    char* text = NULL;
    if (bytes > max_bytes) {
        error_set(error, EXIT_USAGE, "%s: %llu bytes, at most %zu expected", path,
                  (unsigned long long)bytes, max_bytes);
    } else {
        *length = (size_t)bytes;
        text = checked_malloc(*length + 1);
        text[*length] = '\0';
        if (!read_at(fd, text, *length, 0)) {
            error_set(error, EXIT_USAGE, "%s: cannot be read: %s", path,
                      errno ? strerror(errno) : "it has shrunk");
            free(text);
            text = NULL;
        }
    }
    close(fd);
    return text;
}

// ---- values -------------------------------------------------------------------------------------

static const cJSON* member(const cJSON* object, const char* key, JsonContext c) {
    if (!object || c.error->code != 0) return NULL;
    const cJSON* value = cJSON_GetObjectItemCaseSensitive(object, key);
    if (!value) fail(c, "has no", key);
    return value;
}

int64_t json_check_integer(const cJSON* value, const char* what, int64_t min, int64_t max,
                           JsonContext c) {
    if (!value || c.error->code != 0) return min;
    double x = cJSON_IsNumber(value) ? value->valuedouble : (double)NAN;
    if (!(fabs(x) <= (double)JSON_MAX_INTEGER) || x != floor(x)) {
        fail(c, "expected an integer:", what);
        return min;
    }
    int64_t integer = (int64_t)x;
    if (integer < min || integer > max) {
        error_set(c.error, EXIT_USAGE, "%s: %s is %lld, expected %lld to %lld", c.where, what,
                  (long long)integer, (long long)min, (long long)max);
        return min;
    }
    return integer;
}

double json_check_number(const cJSON* value, const char* what, double min, double max,
                         JsonContext c) {
    if (!value || c.error->code != 0) return min;
    if (!cJSON_IsNumber(value)) {
        fail(c, "expected a number:", what);
        return min;
    }
    double x = value->valuedouble;
    if (!(x >= min && x <= max)) {
        error_set(c.error, EXIT_USAGE, "%s: %s is %g, expected %g to %g", c.where, what, x, min,
                  max);
        return min;
    }
    return x;
}

int64_t json_get_integer(const cJSON* object, const char* key, int64_t min, int64_t max,
                         JsonContext c) {
    return json_check_integer(member(object, key, c), key, min, max, c);
}

double json_get_number(const cJSON* object, const char* key, double min, double max,
                       JsonContext c) {
    return json_check_number(member(object, key, c), key, min, max, c);
}

const char* json_get_string(const cJSON* object, const char* key, JsonContext c) {
    const cJSON* value = member(object, key, c);
    if (value && cJSON_IsString(value)) return value->valuestring;
    if (value) fail(c, "expected a string:", key);
    return "";
}

const cJSON* json_get_object(const cJSON* object, const char* key, JsonContext c) {
    const cJSON* value = member(object, key, c);
    if (!value || cJSON_IsObject(value)) return value;
    fail(c, "expected an object:", key);
    return NULL;
}

const cJSON* json_get_array(const cJSON* object, const char* key, int max_length, JsonContext c) {
    const cJSON* value = member(object, key, c);
    if (!value) return NULL;
    if (!cJSON_IsArray(value)) {
        fail(c, "expected an array:", key);
        return NULL;
    }
    int n = cJSON_GetArraySize(value);
    if (n > max_length) {
        error_set(c.error, EXIT_USAGE, "%s: %s has %d elements, at most %d expected", c.where, key,
                  n, max_length);
        return NULL;
    }
    return value;
}
