// dev/test/test_tokenizer.c - ids to text, prompts to ids, and tokenizer files good and bad.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "testing.h"
#include "train/tokenizer.h"

enum { V = 1000 };

static char folder[] = "/tmp/test_tokenizer_XXXXXX";
static char path[100], shards[100];

// A file of V tokens, of which token 1 is "ab", 2 is " c", 3 a NUL and the rest "x".
static void write_tokens(uint32_t magic, uint32_t version, uint32_t count, int cut, int extra) {
    unsigned char bytes[1024 + 3 * V + 1] = {0};
    uint32_t header[4] = {magic, version, count, V - 1};
    memcpy(bytes, header, sizeof header);
    size_t at = 1024;
    for (int id = 0; id < V; id++) {
        const char* text = id == 1 ? "ab" : id == 2 ? " c" : id == 3 ? "" : "x";
        int length = id == 3 ? 1 : (int)strlen(text);
        bytes[at++] = (unsigned char)length;
        memcpy(bytes + at, text, (size_t)length);
        at += (size_t)length;
    }
    FILE* file = fopen(path, "wb");
    CHECK(fwrite(bytes, 1, at - (size_t)cut + (size_t)extra, file) > 0 && fclose(file) == 0, "%s",
          path);
}

static void refuses(const char* what, const char* says) {
    Tokenizer tokenizer;
    Error error = {0};
    EXPECT(!tokenizer_open(&tokenizer, path, NULL, V, &error), "accepted");
    EXPECT(error.code == EXIT_USAGE && strstr(error.text, path) && strstr(error.text, says), "%s",
           error.text);
    test_report("refused: %s", what);
}

static void expect_text(const Tokenizer* tokenizer, const int* ids, int n, const char* expected) {
    char* text = tokenizer_decode(tokenizer, ids, n);
    EXPECT(strcmp(text, expected) == 0, "'%s', expected '%s'", text, expected);
    free(text);
}

static void test_utf8(void) {
    Tokenizer bytes = {.V = 257, .is_byte_level = true};
    const int ids[] = {0xC3, 0xA9, 0xFF, 'a', 0xC3, 0, 256};
    expect_text(&bytes, ids, 7,
                "\xC3\xA9\xEF\xBF\xBD"
                "a\xEF\xBF\xBD");
    test_report("bytes that are not UTF-8");
}

static void test_files(void) {
    Tokenizer tokenizer;
    Error error = {0};
    const int ids[] = {1, 2, 3, 4, V + 5};
    for (uint32_t version = 1; version <= 2; version++) {
        write_tokens(20240328, version, V, 0, 0);
        EXPECT(tokenizer_open(&tokenizer, NULL, shards, V + 10, &error), "%s", error.text);
        EXPECT(tokenizer_has_text(&tokenizer), "found beside the shards");
        expect_text(&tokenizer, ids, 5, "ab cx\xEF\xBF\xBD");
        EXPECT(tokenizer_start_token(&tokenizer) == V + 9, "starts from end of text");
        tokenizer_close(&tokenizer);
        test_report("version %u", version);
    }
    write_tokens(20240329, 1, V, 0, 0);
    refuses("magic", "magic 20240329, expected 20240328");
    write_tokens(20240328, 3, V, 0, 0);
    refuses("version", "version 3");
    write_tokens(20240328, 1, 0, 0, 0);
    refuses("count of 0", "number of tokens 0");
    write_tokens(20240328, 1, V, 1, 0);
    refuses("cut", "ends at token 999 of 1000");
    write_tokens(20240328, 1, V, 0, 1);
    refuses("extra bytes", "more bytes");
    write_tokens(20240328, 1, V, 3000, 0);
    refuses("cut in the header", "header");
    unlink(path);
    refuses("missing file that was asked for", "No such file");
    EXPECT(chdir(folder) == 0 && tokenizer_open(&tokenizer, NULL, shards, V, &error), "%s",
           error.text);
    EXPECT(!tokenizer_has_text(&tokenizer), "text without a file");
    expect_text(&tokenizer, ids, 3, "1 2 3");
    tokenizer_close(&tokenizer);
    test_report("no file: ids");
}

static void test_bytes(void) {
    Tokenizer tokenizer;
    Error error = {0};
    EXPECT(tokenizer_open(&tokenizer, NULL, NULL, 257, &error), "%s", error.text);
    const int ids[] = {'h', 'i', 256, '!'};
    expect_text(&tokenizer, ids, 4, "hi!");
    EXPECT(tokenizer_start_token(&tokenizer) == '\n', "starts from a newline");
    int n = 0;
    int* prompt = tokenizer_prompt(&tokenizer, "h\303", NULL, &n, &error);
    EXPECT(prompt && n == 2 && prompt[0] == 'h' && prompt[1] == 0xC3, "bytes of a prompt");
    free(prompt);
    tokenizer_close(&tokenizer);
    EXPECT(tokenizer_open(&tokenizer, NULL, NULL, 128, &error), "%s", error.text);
    EXPECT(!tokenizer_prompt(&tokenizer, "h\303", NULL, &n, &error) && strstr(error.text, "195"),
           "%s", error.text);
    tokenizer_close(&tokenizer);
    test_report("byte-level");
}

static void test_prompt_tokens(void) {
    Tokenizer tokenizer = {.V = V};
    Error error = {0};
    int n = 0;
    EXPECT(!tokenizer_prompt(&tokenizer, "text", NULL, &n, &error), "no encoder, and yet");
    EXPECT(error.code == EXIT_USAGE && strstr(error.text, "--prompt-tokens"), "%s", error.text);
    memset(&error, 0, sizeof error);
    int* ids = tokenizer_prompt(&tokenizer, NULL, "5,0,999", &n, &error);
    EXPECT(ids && n == 3 && ids[0] == 5 && ids[1] == 0 && ids[2] == 999, "%s", error.text);
    free(ids);
    const char* const bad[] = {
        "", "1,", ",1", "1000", "-1", "1;2", "a", "1,,2", "99999999999999999999"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        memset(&error, 0, sizeof error);
        EXPECT(!tokenizer_prompt(&tokenizer, NULL, bad[i], &n, &error) && error.code == EXIT_USAGE,
               "'%s' accepted", bad[i]);
    }
    test_report("prompts as ids");
}

int main(void) {
    CHECK(mkdtemp(folder), "no temporary folder");
    snprintf(path, sizeof path, "%s/gpt2_tokenizer.bin", folder);
    snprintf(shards, sizeof shards, "%s/train_*.bin", folder);
    test_files();
    test_utf8();
    test_bytes();
    test_prompt_tokens();
    rmdir(folder);
    return test_finish();
}
