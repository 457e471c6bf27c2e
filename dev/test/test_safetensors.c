// test_safetensors.c - the safetensors reader against good, bad and hostile headers, and the writer
// byte for byte.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "testing.h"
#include "train/safetensors.h"

static char scratch_path[64];

static void write_file(const void* bytes, size_t count) {
    FILE* f = fopen(scratch_path, "wb");
    CHECK(f && fwrite(bytes, 1, count, f) == count && fclose(f) == 0, "cannot write %s",
          scratch_path);
}

// 8 bytes of length, the header, then `data_bytes` of 0, 1, 2, ...
static void write_with_header(const char* header, size_t data_bytes) {
    size_t n = strlen(header), total = 8 + n + data_bytes;
    unsigned char* bytes = checked_calloc(total, 1);
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)((uint64_t)n >> (8 * i));
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data_bytes; i++) bytes[8 + n + i] = (unsigned char)i;
    write_file(bytes, total);
    free(bytes);
}

// ---- writer -------------------------------------------------------------------------------------

static void test_writer(void) {
    const size_t matrix[] = {2, 3}, vector[] = {2, 1};
    SafeTensorsHeader header;
    safetensors_header_begin(&header);
    safetensors_header_add(&header, "", "wte.weight", 2, matrix);
    safetensors_header_add(&header, "m.", "ln_f.bias", 1, vector);
    safetensors_header_end(&header);
    static const char expected[] =
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"wte.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
        "\"m.ln_f.bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[24,32]}}";
    size_t n = strlen(expected), padded = round_up(n, 8);
    EXPECT(header.length == 8 + padded, "%zu bytes, expected %zu", header.length, 8 + padded);
    EXPECT(header.data_bytes == 32, "%llu bytes of data", (unsigned long long)header.data_bytes);
    EXPECT(memcmp(header.text + 8, expected, n) == 0, "%.*s", (int)n, header.text + 8);
    for (size_t i = n; i < padded; i++) EXPECT(header.text[8 + i] == ' ', "padding byte %zu", i);
    EXPECT((unsigned char)header.text[0] == padded && header.text[1] == 0, "length %d",
           header.text[0]);
    test_report("safetensors header, byte for byte");

    float values[8] = {0.5f, -1, 2, 3e-39f, 4, 5, 6, 7};
    char* bytes = checked_malloc(header.length + sizeof(values));
    memcpy(bytes, header.text, header.length);
    memcpy(bytes + header.length, values, sizeof(values));
    write_file(bytes, header.length + sizeof(values));
    free(bytes);
    free(header.text);
    Error error = {0};
    SafeTensors file;
    float out[6];
    if (EXPECT(safetensors_open(&file, scratch_path, &error), "%s", error.text)) {
        const SafeTensor* tensor = safetensors_find(&file, "wte.weight");
        EXPECT(tensor && tensor->elems == 6 && tensor->num_dims == 2 && tensor->shape[1] == 3,
               "wte.weight");
        EXPECT(safetensors_read(&file, tensor, 0, 6, out, &error), "%s", error.text);
        EXPECT(memcmp(out, values, sizeof(out)) == 0, "elements differ");
        EXPECT(safetensors_read(&file, tensor, 2, 3, out, &error), "%s", error.text);
        EXPECT(memcmp(out, values + 2, 12) == 0, "a range differs");
        EXPECT(!safetensors_find(&file, "ln_f.bias"), "a name that is not there");
        safetensors_close(&file);
    }
    test_report("safetensors written and read back");
}

// ---- types --------------------------------------------------------------------------------------

static void test_types(void) {
    // 1, -2, inf, the smallest fp16 subnormal; then 1, -0, NaN in bf16; then a type nobody reads.
    static const unsigned char data[] = {0x00, 0x3C, 0x00, 0xC0, 0x00, 0x7C, 0x01, 0x00,
                                         0x80, 0x3F, 0x00, 0x80, 0xC0, 0x7F, 1,    1};
    static const char header[] =
        "{\"half\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]},"
        "\"brain\":{\"dtype\":\"BF16\",\"shape\":[3,1],\"data_offsets\":[8,14]},"
        "\"mask\":{\"dtype\":\"BOOL\",\"shape\":[1,1,2],\"data_offsets\":[14,16]},"
        "\"none\":{\"dtype\":\"F64\",\"shape\":[0,7],\"data_offsets\":[16,16]},"
        "\"scalar\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[16,17]}}";
    unsigned char bytes[sizeof(header) + sizeof(data) + 8] = {0};
    bytes[0] = (sizeof(header) - 1) & 0xFF;
    bytes[1] = (sizeof(header) - 1) >> 8;
    memcpy(bytes + 8, header, sizeof(header) - 1);
    memcpy(bytes + 8 + sizeof(header) - 1, data, sizeof(data));
    write_file(bytes, 8 + sizeof(header) - 1 + sizeof(data) + 1);
    Error error = {0};
    SafeTensors file;
    float out[4];
    if (EXPECT(safetensors_open(&file, scratch_path, &error), "%s", error.text)) {
        EXPECT(safetensors_read(&file, safetensors_find(&file, "half"), 0, 4, out, &error), "%s",
               error.text);
        EXPECT(out[0] == 1 && out[1] == -2 && out[2] > 3e38f && out[3] == 0x1p-24f, "fp16");
        EXPECT(safetensors_read(&file, safetensors_find(&file, "half"), 1, 1, out, &error), "%s",
               error.text);
        EXPECT(out[0] == -2, "a range of fp16: %g", (double)out[0]);
        EXPECT(safetensors_read(&file, safetensors_find(&file, "brain"), 0, 3, out, &error), "%s",
               error.text);
        EXPECT(out[0] == 1 && float_bits(out[1]) == 0x80000000u && out[2] != out[2], "bf16");
        EXPECT(!safetensors_read(&file, safetensors_find(&file, "mask"), 0, 2, out, &error) &&
                   strstr(error.text, "BOOL"),
               "a BOOL tensor is read: %s", error.text);
        safetensors_close(&file);
    }
    test_report("safetensors types F16, BF16, others");
}

// ---- hostile headers ----------------------------------------------------------------------------

#define ENTRY(name, dtype, shape, begin, end)                                                      \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end \
    "]}"
#define A ENTRY("a", "F32", "2", "0", "8")

static const struct {
    const char *name, *header, *problem;
    size_t data_bytes;
} hostile[] = {
    {"no object", "[]", "does not start with '{'", 0},
    {"leading space", " {}", "does not start with '{'", 0},
    {"not JSON", "{nonsense", "not JSON", 0},
    {"cut off", "{\"a\":{\"dtype\":", "not JSON", 0},
    {"text behind", "{" A "}x", "text behind", 8},
    {"control character", "{\"a\x01\":1}", "control character", 0},
    {"entry is a number", "{\"a\":1}", "expected an object", 0},
    {"no dtype", "{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", "dtype", 8},
    {"no shape", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", "shape", 8},
    {"no offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", "data_offsets", 8},
    {"extra key", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}",
     "only", 8},
    {"dtype unknown", "{" ENTRY("a", "F31", "2", "0", "8") "}", "unknown dtype", 8},
    {"dtype a number", "{\"a\":{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}}", "string", 8},
    {"one offset", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", "2 numbers",
     8},
    {"three offsets", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,9]}}",
     "at most 2", 8},
    {"negative dimension", "{" ENTRY("a", "F32", "-2", "0", "8") "}", "a dimension is -2", 8},
    {"fractional dimension", "{" ENTRY("a", "F32", "2.5", "0", "8") "}", "integer", 8},
    {"huge dimension", "{" ENTRY("a", "F32", "1e300", "0", "8") "}", "integer", 8},
    {"shape overflows", "{" ENTRY("a", "F32", "4294967296,4294967296", "0", "8") "}", "overflows",
     8},
    {"bytes overflow", "{" ENTRY("a", "F64", "4294967296,1073741824", "0", "0") "}", "do not fit",
     0},
    {"too many dimensions", "{" ENTRY("a", "F32", "1,1,1,1,1,1,1,1,2", "0", "8") "}", "at most 8",
     8},
    {"negative offset", "{" ENTRY("a", "F32", "2", "-8", "0") "}", "data_offsets[0] is -8", 8},
    {"offset beyond the file", "{" ENTRY("a", "F32", "4", "0", "16") "}", "data_offsets[1] is 16",
     8},
    {"offsets reversed", "{" ENTRY("a", "F32", "2", "8", "0") "}", "do not fit", 8},
    {"offsets too wide", "{" ENTRY("a", "F32", "1", "0", "8") "}", "do not fit", 8},
    {"gap at the start", "{" ENTRY("a", "F32", "1", "4", "8") "}", "gap", 8},
    {"gap between", "{" ENTRY("a", "F32", "1", "0", "4") "," ENTRY("b", "F32", "1", "8", "12") "}",
     "gap", 12},
    {"overlap", "{" A "," ENTRY("b", "F32", "2", "4", "12") "}", "overlap", 12},
    {"the same bytes twice", "{" A "," ENTRY("b", "F32", "2", "0", "8") "}", "overlap", 8},
    {"bytes behind the last", "{" A "}", "end at byte 8 of 9", 9},
    {"name twice", "{" A "," ENTRY("a", "F32", "2", "8", "16") "}", "given twice", 16},
    {"name twice, escaped", "{" A "," ENTRY("\\u0061", "F32", "2", "8", "16") "}", "given twice",
     16},
    {"key twice",
     "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
     "given twice", 8},
    {"empty name", "{" ENTRY("", "F32", "2", "0", "8") "}", "name", 8},
    {"name with a line end", "{" ENTRY("a\\n", "F32", "2", "0", "8") "}", "name", 8},
};

static void test_hostile_headers(void) {
    for (size_t i = 0; i < sizeof(hostile) / sizeof(hostile[0]); i++) {
        Error error = {0};
        SafeTensors file;
        write_with_header(hostile[i].header, hostile[i].data_bytes);
        if (!EXPECT(!safetensors_open(&file, scratch_path, &error), "is accepted")) {
            safetensors_close(&file);
        }
        EXPECT(error.code == EXIT_USAGE && strstr(error.text, hostile[i].problem),
               "says \"%s\", expected \"%s\"", error.text, hostile[i].problem);
        EXPECT(strstr(error.text, scratch_path) && !strchr(error.text, '\n'), "\"%s\"", error.text);
        test_report("safetensors header refused: %s", hostile[i].name);
    }
}

// Bounds that need large or deep text.
static void test_bounds(void) {
    enum { DEPTH = 100000, NAME = 300 };
    char* text = checked_calloc(2 * DEPTH + 100, 1);
    char* at = text + sprintf(text, "{\"a\":");
    memset(at, '[', DEPTH);
    memset(at + DEPTH, ']', DEPTH);
    strcat(text, "}");
    Error deep = {0}, wide = {0}, long_name = {0};
    SafeTensors file;
    EXPECT(!safetensors_parse(&file, "deep", text, strlen(text), 0, &deep) &&
               strstr(deep.text, "deeper than"),
           "%s", deep.text);

    size_t bytes = SAFETENSORS_MAX_HEADER - 100;
    char* values = checked_malloc(bytes);
    memset(values, ',', bytes);
    memcpy(values, "{\"a\":[0", 7);
    for (size_t i = 7; i + 1 < bytes; i += 2) values[i + 1] = '0';
    EXPECT(!safetensors_parse(&file, "wide", values, bytes, 0, &wide) &&
               strstr(wide.text, "more than"),
           "%s", wide.text);
    free(values);

    at = text + sprintf(text, "{\"");
    memset(at, 'n', NAME);
    strcpy(at + NAME, "\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}");
    EXPECT(!safetensors_parse(&file, "name", text, strlen(text), 0, &long_name) &&
               strstr(long_name.text, "too long"),
           "%s", long_name.text);
    free(text);
    test_report("safetensors bounds on depth, values and names");
}

// ---- files --------------------------------------------------------------------------------------

static void expect_refused(const char* what, const char* problem) {
    Error error = {0};
    SafeTensors file;
    if (!EXPECT(!safetensors_open(&file, scratch_path, &error), "is accepted")) {
        safetensors_close(&file);
    }
    EXPECT(strstr(error.text, problem), "says \"%s\", expected \"%s\"", error.text, problem);
    test_report("safetensors file refused: %s", what);
}

static void test_bad_files(void) {
    static const unsigned char huge[8] = {255, 255, 255, 255, 255, 255, 255, 255};
    static const unsigned char negative[16] = {0, 0, 0, 0, 0, 0, 0, 0x80};
    static const unsigned char beyond[16] = {9};
    write_file("", 0);
    expect_refused("empty", "too short");
    write_file("\2\0\0\0\0\0\0", 7);
    expect_refused("7 bytes", "too short");
    write_file("\0\0\0\0\0\0\0\0", 8);
    expect_refused("header of 0 bytes", "does not start");
    write_file(huge, 8);
    expect_refused("header of 2^64 - 1 bytes", "header of 18446744073709551615 bytes");
    write_file(negative, 16);
    expect_refused("header of 2^63 bytes", "header of 9223372036854775808 bytes");
    write_file(beyond, 16);
    expect_refused("header beyond the file", "header of 9 bytes");
    write_file("<!DOCTYPE html><html></html>", 28);
    expect_refused("HTML", "header of");
    write_file("version https://git-lfs.github.com/spec/v1\n", 43);
    expect_refused("Git LFS pointer", "git lfs pull");
    unlink(scratch_path);
    expect_refused("missing", "No such file");
    CHECK(symlink("/tmp", scratch_path) == 0, "symlink");
    expect_refused("directory", "not a regular file");
    unlink(scratch_path);
    CHECK(symlink("/dev/zero", scratch_path) == 0, "symlink");
    expect_refused("device", "not a regular file");
    unlink(scratch_path);
}

int main(void) {
    snprintf(scratch_path, sizeof(scratch_path), "/tmp/test_safetensors.%d", (int)getpid());
    test_writer();
    test_types();
    test_hostile_headers();
    test_bounds();
    test_bad_files();
    return test_finish();
}
