// train/json_number.h - numbers for cJSON: doubles as the shortest text that reads back to the same
// double, integers in full, what is not finite as null.
#ifndef TRAIN_JSON_NUMBER_H
#define TRAIN_JSON_NUMBER_H

#include <stdint.h>
#include <cjson/cJSON.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { JSON_NUMBER_CHARS = 32 };

// "0.25", "1e-5", "null": fewest digits, then the shorter of plain and exponent form.
void json_number_text(double value, char text[JSON_NUMBER_CHARS]);

void json_add_double(cJSON* object, const char* key, double value);
void json_add_int(cJSON* object, const char* key, int64_t value);
void json_add_size(cJSON* object, const char* key, uint64_t value);

#ifdef __cplusplus
}
#endif
#endif
