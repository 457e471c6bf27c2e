// train/json.h - JSON from files that nobody vouches for, over cJSON.
//
// cJSON parses; this file bounds what it is given (size, depth, number of values), refuses control
// bytes, trailing text and keys given twice, and reads typed values in a range. The getters leave
// the first failure in `error` and return a harmless value, so that a reader gets all its fields in
// a row and looks at the error once.
#ifndef TRAIN_JSON_H
#define TRAIN_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>
#include "core/check.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    JSON_MAX_DEPTH = 16,
    JSON_MAX_VALUES = 1 << 22, // cJSON takes 64 bytes and more for each
};

// The largest integer up to which doubles, and so JSON readers, hold every integer: 2^53.
#define JSON_MAX_INTEGER ((int64_t)1 << 53)

typedef struct {
    const char* where; // names the file in messages
    Error* error;
} JsonContext;

// The tree of a text whose top is an object, to be freed with cJSON_Delete; NULL with `error`.
cJSON* json_parse(const char* text, size_t length, JsonContext context);

// A whole regular file of at most max_bytes with a NUL behind it, to be freed; NULL with the error
// set (code 2).
char* json_read_file(const char* path, size_t max_bytes, size_t* length, Error* error);

// Members that must be there. `object` may be NULL after an earlier failure.
int64_t json_get_integer(const cJSON* object, const char* key, int64_t min, int64_t max,
                         JsonContext);
double json_get_number(const cJSON* object, const char* key, double min, double max, JsonContext);
const char* json_get_string(const cJSON* object, const char* key, JsonContext); // "" on failure
const cJSON* json_get_object(const cJSON* object, const char* key, JsonContext);
const cJSON* json_get_array(const cJSON* object, const char* key, int max_length, JsonContext);

// Checks of a value by itself; `what` names it.
int64_t json_check_integer(const cJSON* value, const char* what, int64_t min, int64_t max,
                           JsonContext);
double json_check_number(const cJSON* value, const char* what, double min, double max, JsonContext);

#ifdef __cplusplus
}
#endif
#endif
