// dev/test/test_hellaswag.c - rows, scores, and evaluation files good and bad.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "testing.h"
#include "train/hellaswag.h"

enum { T = 8, V = 100, EXAMPLES = 3, EXAMPLE_WORDS = 5 + 1 + 3 + 4 * 1 + (1 + 2 + 3 + 4) };

static char path[] = "/tmp/test_hellaswag_XXXXXX";

typedef struct {
    int32_t header[256];
    uint16_t words[EXAMPLES * EXAMPLE_WORDS];
} File;
enum { FILE_BYTES = 1024 + 2 * EXAMPLES * EXAMPLE_WORDS }; // without padding at the end

// Examples with a context of 3 tokens (10, 11, 12) and endings of 1 to 4 tokens (20 + ending); the
// label of example e is e.
static File good_file(void) {
    File file = {{20240522, 1, EXAMPLES, EXAMPLE_WORDS * 2}, {0}};
    uint16_t* w = file.words;
    for (int e = 0; e < EXAMPLES; e++) {
        *w++ = 65535, *w++ = EXAMPLE_WORDS * 2, *w++ = (uint16_t)e, *w++ = (uint16_t)e, *w++ = 4;
        *w++ = 3, *w++ = 10, *w++ = 11, *w++ = 12;
        for (int ending = 0; ending < 4; ending++) {
            *w++ = (uint16_t)(ending + 1);
            for (int i = 0; i <= ending; i++) *w++ = (uint16_t)(20 + ending);
        }
    }
    return file;
}

static void write_file(const File* file, size_t bytes) {
    FILE* out = fopen(path, "wb");
    CHECK(fwrite(file, 1, bytes, out) == bytes && fclose(out) == 0, "%s: not written", path);
}

static void expect_row(const int* row, const int* expected, const char* what) {
    for (int t = 0; t < T; t++)
        EXPECT(row[t] == expected[t], "%s %d: %d, expected %d", what, t, row[t], expected[t]);
}

static void test_rows(void) {
    HellaSwag eval;
    Error error = {0};
    int inputs[T], targets[T];
    File file = good_file();
    write_file(&file, FILE_BYTES);
    EXPECT(hellaswag_open(&eval, path, T, V, &error), "%s", error.text);
    EXPECT(hellaswag_num_rows(&eval) == 12 && eval.row_tokens[4 + 2] == 3, "rows");
    EXPECT(hellaswag_row(&eval, 4 + 2, inputs, targets, &error), "%s", error.text);
    expect_row(inputs, (int[T]){10, 11, 12, 22, 22, 22, 0, 0}, "input");
    expect_row(targets, (int[T]){-1, -1, 22, 22, 22, -1, -1, -1}, "target");
    test_report("a row");

    double losses[12];
    for (int row = 0; row < 12; row++) losses[row] = 10.0 * eval.row_tokens[row];
    EXPECT(hellaswag_correct(&eval, losses) == 1,
           "all equal: the first ending, right for example 0");
    losses[4 + 1] = 19.9; // example 1: mean 9.95; a sum would choose ending 0
    losses[8 + 3] = 39.9; // example 2: ending 3 is wrong
    EXPECT(hellaswag_correct(&eval, losses) == 2, "%d", hellaswag_correct(&eval, losses));
    test_report("the lowest mean wins");
    hellaswag_close(&eval);

    EXPECT(hellaswag_open(&eval, path, 5, V, &error), "%s", error.text);
    EXPECT(hellaswag_row(&eval, 3, inputs, targets, &error), "%s", error.text);
    EXPECT(inputs[0] == 11 && inputs[1] == 12 && inputs[2] == 23 && targets[1] == 23,
           "context is cut");
    hellaswag_close(&eval);
    test_report("a context that is too long loses its beginning");
}

static void refuses(const File* file, size_t bytes, int seq_len, const char* says) {
    HellaSwag eval;
    Error error = {0};
    write_file(file, bytes);
    EXPECT(!hellaswag_open(&eval, path, seq_len, V, &error), "accepted");
    EXPECT(error.code == EXIT_USAGE && strstr(error.text, path) && strstr(error.text, says), "%s",
           error.text);
    test_report("refused: %s", says);
}

static void refuses_header(int word, int32_t value, const char* says) {
    File file = good_file();
    file.header[word] = value;
    refuses(&file, FILE_BYTES, T, says);
}

// A word of example 1.
static void refuses_word(int word, uint16_t value, const char* says) {
    File file = good_file();
    file.words[EXAMPLE_WORDS + word] = value;
    refuses(&file, FILE_BYTES, T, says);
}

static void test_bad_files(void) {
    File file = good_file();
    refuses_header(0, 1, "magic 1, expected 20240522");
    refuses_header(1, 2, "version 2, expected 1");
    refuses_header(2, 0, "number of examples 0");
    refuses_header(2, -5, "number of examples -5");
    refuses_header(2, EXAMPLES + 1, "size");
    refuses_header(2, EXAMPLES - 1, "size");
    refuses_word(0, 7, "example 1: start mark 7");
    refuses_word(1, 3, "example 1: bytes 3");
    refuses_word(1, EXAMPLE_WORDS * 2 - 2, "example 1: ending 4");
    refuses_word(3, 4, "example 1: label 4");
    refuses_word(4, 3, "example 1: number of endings 3");
    refuses_word(5, 0, "example 1: context 0");
    refuses_word(5, 60000, "example 1: context 60000");
    refuses_word(7, V, "example 1: context 100");
    refuses_word(10, V, "example 1: ending 100");
    refuses(&file, FILE_BYTES - 2, T, "size");
    refuses(&file, 500, T, "size 500");
    refuses(&file, FILE_BYTES, 3, "ending tokens 4");
    HellaSwag eval;
    Error error = {0};
    unlink(path);
    EXPECT(!hellaswag_open(&eval, path, T, V, &error) && error.code == EXIT_USAGE, "%s",
           error.text);
    test_report("refused: a file that is not there");
}

int main(void) {
    int fd = mkstemp(path);
    CHECK(fd >= 0, "no temporary file");
    close(fd);
    test_rows();
    test_bad_files();
    return test_finish();
}
