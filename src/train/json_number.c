// train/json_number.c - shortest decimal text of a double, see json_number.h.
#include "train/json_number.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// 17 significant digits always read back to the same double; most numbers need fewer.
void json_number_text(double value, char text[JSON_NUMBER_CHARS]) {
    if (!isfinite(value)) {
        strcpy(text, "null");
        return;
    }
    char scientific[JSON_NUMBER_CHARS]; // d.ddde+XX
    int digits = 1;
    for (;; digits++) {
        snprintf(scientific, sizeof scientific, "%.*e", digits - 1, value);
        if (digits == 17 || strtod(scientific, NULL) == value) break;
    }
    char* e = strchr(scientific, 'e');
    int exponent = atoi(e + 1);
    snprintf(e, sizeof scientific - (size_t)(e - scientific), "e%d", exponent);

    // Plain form: enough decimals for the same digits. Beyond 10^21 it is never the shorter one.
    int decimals = digits - 1 - exponent;
    if (exponent > 20 || exponent < -8 || (decimals < 0 && -decimals > 4)) {
        strcpy(text, scientific);
        return;
    }
    snprintf(text, JSON_NUMBER_CHARS, "%.*f", decimals > 0 ? decimals : 0, value);
    if (strlen(scientific) < strlen(text)) strcpy(text, scientific);
}

void json_add_double(cJSON* object, const char* key, double value) {
    char text[JSON_NUMBER_CHARS];
    json_number_text(value, text);
    cJSON_AddRawToObject(object, key, text);
}

void json_add_int(cJSON* object, const char* key, int64_t value) {
    char text[JSON_NUMBER_CHARS];
    snprintf(text, sizeof text, "%lld", (long long)value);
    cJSON_AddRawToObject(object, key, text);
}

void json_add_size(cJSON* object, const char* key, uint64_t value) {
    char text[JSON_NUMBER_CHARS];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    cJSON_AddRawToObject(object, key, text);
}
