// gpt2/config.c - descriptors: from "d12" or "L=2,NH=4,C=64" to a configuration.
//
// Sources of the tables: GPT-2, Radford et al. 2019, table 2 (heads: C / 64); GPT-3, Brown et al.
// 2020, arXiv:2005.14165, table 2.1. Depths and widths between and beyond are llm.c's, whose
// descriptors are taken unchanged.
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "gpt2/gpt2.h"

enum { GPT2_VOCAB = 50257, GPT2_SEQ_LEN = 1024, GPT3_SEQ_LEN = 2048 };

typedef struct {
    int L, C, NH;
} Size;

static const Size gpt2_sizes[] = {{6, 384, 6},    {12, 768, 12},  {24, 1024, 16}, {36, 1280, 20},
                                  {48, 1600, 25}, {60, 1920, 30}, {72, 2880, 30}, {84, 3456, 36}};
static const Size gpt3_sizes[] = {{6, 384, 6},    {12, 768, 12},  {24, 1024, 16}, {24, 1536, 16},
                                  {24, 2048, 16}, {32, 2560, 32}, {32, 4096, 32}, {96, 12288, 96}};
static const struct {
    const char* name;
    int L;
} gpt2_names[] = {{"gpt2", 12}, {"gpt2-medium", 24}, {"gpt2-large", 36}, {"gpt2-xl", 48}};

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

// All of `text` as a positive decimal number.
static bool parse_count(const char* text, int* value) {
    if (*text < '0' || *text > '9') return false;
    char* end;
    errno = 0;
    long n = strtol(text, &end, 10);
    if (errno != 0 || *end != '\0' || n > INT_MAX) return false;
    *value = (int)n;
    return true;
}

static void set_size(GPT2Config* config, Size size, int T) {
    GPT2Config c = {size.L, size.NH, size.C, GPT2_VOCAB, T};
    *config = c;
}

// L=..,NH=..,C=..[,V=..][,T=..] in any order, each at most once.
static bool parse_custom(GPT2Config* config, const char* text, int default_vocab, Error* error) {
    GPT2Config c = {0, 0, 0, 0, 0};
    struct {
        const char* key;
        int* value;
    } fields[] = {{"L", &c.L}, {"NH", &c.NH}, {"C", &c.C}, {"V", &c.V}, {"T", &c.T}};
    char copy[200];
    if (strlen(text) >= sizeof(copy))
        return error_set(error, EXIT_USAGE, "-e: descriptor of %zu characters", strlen(text));
    strcpy(copy, text);
    char* rest = copy;
    for (char* item; (item = strsep(&rest, ",")) != NULL;) {
        char* equals = strchr(item, '=');
        int* field = NULL;
        if (equals) *equals = '\0';
        for (size_t i = 0; equals && i < COUNT(fields); i++) {
            if (strcmp(item, fields[i].key) == 0) field = fields[i].value;
        }
        if (!field)
            return error_set(error, EXIT_USAGE, "-e %s: '%s' is not one of L= NH= C= V= T=", text,
                             item);
        if (*field != 0)
            return error_set(error, EXIT_USAGE, "-e %s: %s is given twice", text, item);
        if (!parse_count(equals + 1, field) || *field < 1)
            return error_set(error, EXIT_USAGE, "-e %s: %s=%s is not a positive number", text, item,
                             equals + 1);
    }
    if (c.L == 0 || c.NH == 0 || c.C == 0)
        return error_set(error, EXIT_USAGE, "-e %s: %s is missing (L, NH and C are required)", text,
                         c.L == 0    ? "L"
                         : c.NH == 0 ? "NH"
                                     : "C");
    if (c.V == 0) c.V = default_vocab;
    if (c.T == 0) c.T = GPT2_SEQ_LEN;
    *config = c;
    return gpt2_config_check(config, text, error);
}

bool gpt2_config_parse(GPT2Config* config, const char* text, int default_vocab, bool* is_descriptor,
                       Error* error) {
    const char* number = NULL;
    bool is_gpt3 = strncmp(text, "gpt3:c", 6) == 0;
    if (is_gpt3)
        number = text + 6;
    else if (strncmp(text, "gpt2:d", 6) == 0)
        number = text + 6;
    else if (text[0] == 'd' && text[1] >= '0' && text[1] <= '9')
        number = text + 1;
    if (is_descriptor) *is_descriptor = true;

    for (size_t i = 0; i < COUNT(gpt2_names); i++) {
        if (strcmp(text, gpt2_names[i].name) != 0) continue;
        for (size_t s = 0; s < COUNT(gpt2_sizes); s++) {
            if (gpt2_sizes[s].L == gpt2_names[i].L) set_size(config, gpt2_sizes[s], GPT2_SEQ_LEN);
        }
        return true;
    }
    int n;
    if (number && parse_count(number, &n)) {
        const Size* sizes = is_gpt3 ? gpt3_sizes : gpt2_sizes;
        size_t count = is_gpt3 ? COUNT(gpt3_sizes) : COUNT(gpt2_sizes);
        for (size_t s = 0; s < count; s++) {
            if ((is_gpt3 ? sizes[s].C : sizes[s].L) != n) continue;
            set_size(config, sizes[s], is_gpt3 ? GPT3_SEQ_LEN : GPT2_SEQ_LEN);
            return true;
        }
        return error_set(error, EXIT_USAGE, "-e %s: no such size; known are %s", text,
                         is_gpt3 ? "gpt3:c384 c768 c1024 c1536 c2048 c2560 c4096 c12288"
                                 : "d6 d12 d24 d36 d48 d60 d72 d84");
    }
    if (strchr(text, '=') && !strchr(text, '/'))
        return parse_custom(config, text, default_vocab, error);

    if (is_descriptor) *is_descriptor = false;
    return error_set(error, EXIT_USAGE,
                     "-e %s: neither a model folder or file nor a descriptor (d12, gpt2:d48, "
                     "gpt3:c768, gpt2-xl, or L=2,NH=4,C=64[,V=257][,T=128])",
                     text);
}

bool gpt2_config_check(const GPT2Config* config, const char* where, Error* error) {
    const int* values = (const int*)config;
    const char* names[] = {"L", "NH", "C", "V", "T"};
    // Far beyond any model that fits a machine, and small enough that 64 bits hold the bytes of its
    // weights, gradients and optimizer.
    const int limits[] = {10000, 10000, 1 << 20, 1 << 24, 1 << 24};
    for (int i = 0; i < 5; i++) {
        if (values[i] < 1 || values[i] > limits[i])
            return error_set(error, EXIT_USAGE, "%s: %s is %d, expected 1 to %d", where, names[i],
                             values[i], limits[i]);
    }
    if (config->C % config->NH != 0)
        return error_set(error, EXIT_USAGE, "%s: NH=%d does not divide C=%d", where, config->NH,
                         config->C);
    return true;
}

double gpt2_flops_per_token(const GPT2Config* config, int T) {
    double L = config->L, C = config->C, V = config->V;
    double weights = 12 * L * C * C + V * C;
    return 6 * weights + 6 * L * C * T;
}
