// dev/test/test_dataloader.c - shards good and bad, the order of samples, identity.
//
// Where the order is looked at, tokens are their own address (uint32 shards: shard * 10000 +
// position), so that a sample says where it comes from.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include "testing.h"
#include "train/dataloader.h"

enum { T = 8, V_ADDRESS = 1 << 20, SHARD_STEP = 10000 };

static char folder[] = "/tmp/test_dataloader_XXXXXX";

static const char* in_folder(const char* name) {
    static char paths[4][200];
    static int next;
    char* path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_file(const char* name, const void* bytes, size_t size) {
    FILE* file = fopen(in_folder(name), "wb");
    CHECK(file && fwrite(bytes, 1, size, file) == size && fclose(file) == 0, "%s: not written",
          name);
}

// A shard of `count` tokens: token i is first + i.
static void write_shard(const char* name, int token_bytes, int count, int first) {
    size_t size = 1024 + (size_t)count * (size_t)token_bytes;
    unsigned char* bytes = calloc(1, size);
    int32_t header[3] = {token_bytes == 2 ? 20240520 : 20240801, token_bytes == 2 ? 1 : 7, count};
    memcpy(bytes, header, sizeof header);
    for (int i = 0; i < count; i++) {
        uint32_t token = (uint32_t)(first + i);
        memcpy(bytes + 1024 + (size_t)i * (size_t)token_bytes, &token, (size_t)token_bytes);
    }
    write_file(name, bytes, size);
    free(bytes);
}

static DataConfig config_of(const char* name, int V, uint64_t samples_per_step) {
    DataConfig config = {"-i", in_folder(name), T, V, 1337, samples_per_step};
    return config;
}

// ---- order --------------------------------------------------------------------------------------

static void open_addresses(DataLoader* loader, uint64_t samples_per_step) {
    Error error = {0};
    DataConfig config = config_of("order_*.bin", V_ADDRESS, samples_per_step);
    EXPECT(dataloader_open(loader, &config, &error), "%s", error.text);
}

// Address of each sample of `steps` steps, in global order, read as (N ranks, micro-batches of B).
static int* read_order(DataLoader* loader, int S, int steps, int N, int B) {
    int* order = malloc((size_t)(S * steps) * sizeof(int));
    int *inputs = malloc((size_t)(B * T) * sizeof(int)),
        *targets = malloc((size_t)(B * T) * sizeof(int));
    Error error = {0};
    for (int step = 1; step <= steps; step++)
        for (int micro = 0; micro < S / (N * B); micro++)
            for (int rank = 0; rank < N; rank++) {
                EXPECT(dataloader_batch(loader, step, micro, rank, N, B, inputs, targets, &error),
                       "%s", error.text);
                for (int b = 0; b < B; b++) {
                    order[(step - 1) * S + (micro * N + rank) * B + b] = inputs[b * T];
                    for (int t = 0; t < T; t++)
                        EXPECT(inputs[b * T + t] == inputs[b * T] + t &&
                                   targets[b * T + t] == inputs[b * T] + t + 1,
                               "tokens of a sample are consecutive, targets one later");
                }
            }
    free(inputs);
    free(targets);
    return order;
}

static void test_order(void) {
    // 12 + 7 + 5 = 24 samples, with 3, 0 and 7 tokens left over; order_d is too short for one.
    write_shard("order_a.bin", 4, 12 * T + 4, 0);
    write_shard("order_b.bin", 4, 7 * T + 1, SHARD_STEP);
    write_shard("order_c.bin", 4, 5 * T + 8, 2 * SHARD_STEP);
    write_shard("order_d.bin", 4, T, 3 * SHARD_STEP);
    enum { S = 10, STEPS = 12, EPOCH = 24 }; // 120 samples: five epochs, steps cross them
    DataLoader loader;
    open_addresses(&loader, S);
    EXPECT(loader.num_shards == 3 && loader.num_samples == EPOCH, "%d shards, %d samples",
           loader.num_shards, (int)loader.num_samples);
    EXPECT(dataloader_epoch_steps(&loader) == 2, "whole steps of an epoch");
    test_report("shards and samples");

    int* order = read_order(&loader, S, STEPS, 1, 1);
    int first_epoch[12];
    for (int epoch = 0; epoch < 5; epoch++) {
        bool seen[3][12] = {{false}};
        int runs = 0, last = -1, longest[12],
            n = 0; // longest: order inside the shard of 12 samples
        for (int i = 0; i < EPOCH; i++) {
            int address = order[epoch * EPOCH + i], shard = address / SHARD_STEP;
            int sample = address % SHARD_STEP / T;
            EXPECT(address % SHARD_STEP % T == 0 && shard < 3 && sample < 12, "address %d",
                   address);
            EXPECT(!seen[shard][sample], "epoch %d: sample %d of shard %d twice", epoch, sample,
                   shard);
            seen[shard][sample] = true;
            if (shard == 0) longest[n++] = sample;
            runs += shard != last;
            last = shard;
        }
        EXPECT(runs == 3, "epoch %d goes shard by shard, in %d runs", epoch, runs);
        if (epoch == 0) memcpy(first_epoch, longest, sizeof longest);
        if (epoch > 0)
            EXPECT(memcmp(first_epoch, longest, sizeof longest) != 0, "epoch %d as the first",
                   epoch);
    }
    bool is_shuffled = false;
    for (int i = 1; i < 5; i++) is_shuffled |= order[i] != order[i - 1] + T;
    EXPECT(is_shuffled, "samples in file order");
    test_report("every epoch has every sample once, in an order of its own");

    const int splits[][2] = {{2, 5}, {5, 2}, {1, 10}, {10, 1}, {1, 2}, {5, 1}};
    for (int i = 0; i < 6; i++) {
        int* other = read_order(&loader, S, STEPS, splits[i][0], splits[i][1]);
        EXPECT(memcmp(order, other, S * STEPS * sizeof(int)) == 0, "differs");
        test_report("the same order for N = %d, B = %d", splits[i][0], splits[i][1]);
        free(other);
    }
    // A loader that starts in the middle sees what comes next, whatever it read before.
    DataLoader second;
    open_addresses(&second, S);
    int inputs[S * T], targets[S * T];
    Error error = {0};
    EXPECT(dataloader_batch(&second, 7, 0, 0, 1, S, inputs, targets, &error), "%s", error.text);
    for (int b = 0; b < S; b++) EXPECT(inputs[b * T] == order[6 * S + b], "sample %d of step 7", b);
    test_report("step 7 first");
    dataloader_close(&second);

    DataConfig other_seed = config_of("order_*.bin", V_ADDRESS, S);
    other_seed.seed = 7;
    EXPECT(dataloader_open(&second, &other_seed, &error), "%s", error.text);
    int* other = read_order(&second, S, STEPS, 1, S);
    EXPECT(memcmp(order, other, EPOCH * sizeof(int)) != 0, "another seed, the same order");
    test_report("another seed, another order");
    free(other);
    free(order);
    dataloader_close(&second);
    dataloader_close(&loader);
}

static void test_validation(void) {
    DataLoader loader;
    Error error = {0};
    open_addresses(&loader, 1);
    int inputs[T], targets[T];
    for (uint64_t i = 0; i < loader.num_samples; i++) {
        EXPECT(dataloader_val_sequence(&loader, i, inputs, targets, &error), "%s", error.text);
        int shard = i < 12 ? 0 : i < 19 ? 1 : 2, first = shard == 0 ? 0 : shard == 1 ? 12 : 19;
        EXPECT(inputs[0] == shard * SHARD_STEP + ((int)i - first) * T, "sequence %d", (int)i);
    }
    test_report("validation in file order");
    EXPECT(dataloader_val_count(&loader, 1, 10 * T) == 10, "one batch");
    EXPECT(dataloader_val_count(&loader, 20, 10 * T) == 24, "more than there are");
    EXPECT(dataloader_val_count(&loader, -1, 10 * T) == 24, "all");
    EXPECT(dataloader_val_count(&loader, 0, 10 * T) == 0, "none");
    test_report("how many sequences validation covers");
    dataloader_close(&loader);
}

// ---- files --------------------------------------------------------------------------------------

// Opening must fail with code 2 in one line that holds the name and all of `says` (separated by |).
static void refuses(const char* name, int V, uint64_t samples, const char* says) {
    DataLoader loader;
    Error error = {0};
    char parts[300], *rest = parts;
    DataConfig config = config_of(name, V, samples);
    EXPECT(!dataloader_open(&loader, &config, &error), "accepted");
    EXPECT(error.code == EXIT_USAGE, "code %d", error.code);
    EXPECT(strstr(error.text, name) && !strchr(error.text, '\n'), "%s", error.text);
    snprintf(parts, sizeof parts, "%s", says);
    for (char* part; (part = strtok_r(rest, "|", &rest));)
        EXPECT(strstr(error.text, part), "no '%s' in: %s", part, error.text);
    test_report("refused: %s", name);
}

static void spoil(const char* name, const char* copy_of, int word, int32_t value) {
    unsigned char bytes[4096];
    FILE* file = fopen(in_folder(copy_of), "rb");
    size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    memcpy(bytes + 4 * word, &value, 4);
    write_file(name, bytes, size);
}

static void test_bad_files(void) {
    char html[3000] = "<!DOCTYPE html><html><body>404 Not Found";
    write_shard("good.bin", 2, 60, 0);
    spoil("badmagic.bin", "good.bin", 0, 20240521);
    spoil("badver.bin", "good.bin", 1, 2);
    spoil("hdrbig.bin", "good.bin", 2, 61);
    spoil("hdrsmall.bin", "good.bin", 2, 59);
    spoil("hdrneg.bin", "good.bin", 2, -60);
    spoil("trunc.bin", "good.bin", 2, 60);
    CHECK(truncate(in_folder("trunc.bin"), 1024 + 100) == 0, "truncate");
    write_file("empty.bin", "", 0);
    write_file("html.bin", html, sizeof html);
    write_file("words.bin", "just a few words", 16);
    refuses("missing.bin", 100, 1, "-i|no such file");
    refuses("badmagic.bin", 100, 1, "magic|20240521|20240520");
    refuses("badver.bin", 100, 1, "version 2|expected 1");
    refuses("hdrbig.bin", 100, 1, "size 1144|expected 1146|61");
    refuses("hdrsmall.bin", 100, 1, "size 1144|expected 1142");
    refuses("hdrneg.bin", 100, 1, "-60");
    refuses("trunc.bin", 100, 1, "size 1124|expected 1144");
    refuses("empty.bin", 100, 1, "size 0|1024");
    refuses("html.bin", 100, 1, "magic");
    refuses("words.bin", 100, 1, "size 16|1024");
    refuses("good.bin", 59, 1, "token 59 is 59|59|byte 1142");
    refuses("good.bin", 100, 8, "60 tokens|65");
    write_file("empty.txt", "", 0);
    refuses("empty.txt", 257, 1, "0 tokens|9");
    write_file("bytes.txt", "h\303\251llo wonderful world", 22);
    refuses("bytes.txt", 128, 1, "token 1 is 195|128");

    DataLoader loader;
    Error error = {0};
    DataConfig config = config_of("good.bin", 60, 7); // 7 * T + 1 = 57 tokens are enough
    EXPECT(dataloader_open(&loader, &config, &error), "%s", error.text);
    EXPECT(loader.num_samples == 7, "%d samples", (int)loader.num_samples);
    dataloader_close(&loader);
    test_report("exactly enough tokens");

    int inputs[T], targets[T];
    config = config_of("bytes.txt", 257, 1);
    EXPECT(dataloader_open(&loader, &config, &error), "%s", error.text);
    EXPECT(dataloader_val_sequence(&loader, 0, inputs, targets, &error), "%s", error.text);
    EXPECT(inputs[0] == 'h' && inputs[1] == 0xC3 && targets[1] == 0xA9 && targets[7] == 'o',
           "bytes");
    EXPECT(dataloader_default_vocab(config.pattern) == 257, ".txt has 257");
    EXPECT(dataloader_default_vocab("a_*.bin") == 50257, ".bin has 50257");
    dataloader_close(&loader);
    test_report("text as bytes");

    // A file that shrinks while it is used.
    config = config_of("shrinks.bin", 100, 1);
    write_shard("shrinks.bin", 2, 60, 0);
    EXPECT(dataloader_open(&loader, &config, &error), "%s", error.text);
    CHECK(truncate(in_folder("shrinks.bin"), 1024) == 0, "truncate");
    EXPECT(!dataloader_val_sequence(&loader, 0, inputs, targets, &error), "read beyond the end");
    EXPECT(error.code == EXIT_FILE_IO && strstr(error.text, "shrinks.bin"), "%s", error.text);
    dataloader_close(&loader);
    test_report("a file that shrinks");
}

// A sparse shard of `tokens` zeros with one other token.
static void write_sparse(const char* name, int tokens, int at, uint16_t value) {
    write_shard(name, 2, 0, 0);
    int fd = open(in_folder(name), O_WRONLY);
    int32_t count = tokens;
    bool ok = pwrite(fd, &count, 4, 8) == 4 && ftruncate(fd, 1024 + 2 * (off_t)tokens) == 0 &&
              pwrite(fd, &value, 2, 1024 + 2 * (off_t)at) == 2;
    CHECK(ok && close(fd) == 0, "%s: not written", name);
}

static void test_large(void) {
    // Beyond 256 MiB tokens are not checked at start, but before they are used.
    enum { TOKENS = 150 << 20, AT = 100 * T + 3 };
    DataLoader loader;
    Error error = {0};
    int inputs[T], targets[T];
    write_sparse("large.bin", TOKENS, AT, 300);
    DataConfig config = config_of("large.bin", 257, 1);
    EXPECT(dataloader_open(&loader, &config, &error), "%s", error.text);
    EXPECT(dataloader_val_sequence(&loader, 99, inputs, targets, &error), "%s", error.text);
    EXPECT(!dataloader_val_sequence(&loader, 100, inputs, targets, &error),
           "a bad token got through");
    EXPECT(error.code == EXIT_USAGE && strstr(error.text, "token 803 is 300"), "%s", error.text);
    Error check_error = {0};
    EXPECT(!dataloader_check(&loader, &check_error) && strstr(check_error.text, "token 803 is 300"),
           "%s", check_error.text);
    dataloader_close(&loader);
    test_report("a bad token in a large file");

    write_sparse("huge.bin", 1200 << 20, (1200 << 20) - T, 40000); // 2.4 GB
    config = config_of("huge.bin", 65536, 1);
    memset(&error, 0, sizeof error);
    EXPECT(dataloader_open(&loader, &config, &error), "%s", error.text);
    EXPECT(dataloader_val_sequence(&loader, loader.num_samples - 1, inputs, targets, &error), "%s",
           error.text);
    EXPECT(targets[T - 1] == 40000, "token %d", targets[T - 1]);
    dataloader_close(&loader);
    test_report("a file of 2.4 GB");
}

static void test_identity(void) {
    enum { BYTES = 200000 };
    unsigned char* bytes = malloc(BYTES);
    for (int i = 0; i < BYTES; i++) bytes[i] = (unsigned char)(i * 7 + i / 251);
    write_file("identity.txt", bytes, BYTES);
    write_file("identity2.txt", bytes, 100);
    DataLoader loader;
    Error error = {0};
    DataConfig config = config_of("identity*.txt", 257, 1);
    EXPECT(dataloader_open(&loader, &config, &error), "%s", error.text);
    DataFile* files = dataloader_identity(&loader, &error);
    EXPECT(files && loader.num_shards == 2, "%s", error.text);
    uLong crc = crc32(crc32(0, bytes, 65536), bytes + BYTES - 65536, 65536);
    uLong crc2 = crc32(crc32(0, bytes, 100), bytes, 100);
    EXPECT(strcmp(files[0].name, "identity.txt") == 0 && files[0].bytes == BYTES &&
               files[0].crc32 == crc,
           "long file");
    EXPECT(strcmp(files[1].name, "identity2.txt") == 0 && files[1].crc32 == crc2, "short file");
    free(files);
    free(bytes);
    dataloader_close(&loader);
    test_report("identity of the data");
}

int main(void) {
    CHECK(mkdtemp(folder), "no temporary folder");
    test_order();
    test_validation();
    test_bad_files();
    test_large();
    test_identity();
    char command[100];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    CHECK(system(command) == 0, "%s not removed", folder);
    return test_finish();
}
